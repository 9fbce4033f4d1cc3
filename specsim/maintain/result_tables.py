"""Tables of kept GPU results: headline figures, differential grids, other proofs, and benchmark suites."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specsim.bench.row import OURS
from specsim.core.display import near
from specsim.core.kinds import DEFAULT, KINDS
from specsim.maintain.page import Column, markdown, table
from specsim.maintain.results import Result, changed_modules, missing_groups, runs_of, suite_command

ROUND = (f"{KINDS[DEFAULT].title} round", "(4, 3, 8)")  # name and tree of the benchmark row on the front page
SUITE_ORDER = "round persistent kernels experts scale baselines adaptive serving tensor-parallel".split()
WHOLE_SUITES = ("baselines", "serving", "tensor-parallel")  # whose rows are all on the guide's page
MAX_ROWS = 8  # of one operation that get a table row each
# Texts in kept results, and today's words for them.
RENAMED = {
    "time / floor": "time / roofline bound",
    "us in all": "total time, us",
    "all that is neither model nor vocabulary": "all operations but model and vocabulary",
    "columns, selection and tree": "cache locations, selection and tree",
    "shipped pair, alone and in company": "shipped pair, solo and batched",
}
PAGE_HEAD = "# Measured on GPUs\n\nWritten by `python -m specsim.maintain.tables`.\n\n"


def _read_all(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(pattern)]


def figures(folder: Path) -> str:
    """List three headline figures; a figure whose result is not kept is left out."""
    lines = (("diff-full-float32-cuda", _differential), ("certify-cuda", _exact_cases), ("bench-round", _round))
    return "\n".join(line(result) for name, line in lines for result in _read_all(folder, f"{name}.json"))


def _differential(result: Result) -> str:
    mismatches = f"{result['mismatches']:,} mismatches" if result["mismatches"] else "no mismatch"
    return (
        f"- **{result['decisions']:,} decisions, {mismatches}**: kernels against the reference in "
        f"{result['num_cells']:,} settings. `specsim diff --grid full`"
    )


def _distances(result: Result) -> Mapping[str, list[float]]:
    """Collect the distances of certificates by promise."""
    distances = defaultdict(list)
    for certificate in result["certificates"]:
        distances[certificate["promise"]].append(certificate["total_variation_float"])
    return distances


def _exact_cases(result: Result) -> str:
    lossless = _distances(result)["lossless"]
    return (
        f"- **{lossless.count(0)} of {len(lossless)} lossless cases exact**: the verifier's output distribution, in "
        f"fractions, is the target's. `{result['command']}`"
    )


def _round(result: Result) -> str:
    name, tree = ROUND
    row = next(row for row in result["rows"] if row["name"] == name and row["setting"].get("tree") == tree)
    milliseconds = row["timings"][OURS]["median_us"] / 1e3
    gpu = result["runs"][0]["versions"]["gpu"]
    return (
        f"- **{milliseconds:.2f} ms a round, {row['time_over_bound']:.2f} × the roofline bound**: "
        f"{KINDS[DEFAULT].title} on {result['shape']} (bfloat16, one request, one {gpu}). `specsim bench --suite round`"
    )


def grids(folder: Path) -> str:
    """Make the table of the kept differential grids, with the machine and versions of their runs."""
    results = _read_all(folder, "diff-*.json")
    results.sort(key=lambda result: (result["num_cells"], result["dtype"] != "float32"))
    return "\n".join([*table(GRID_COLUMNS, results), "", _measured_on(results)])


def _compared_share(result: Result) -> float:
    compared = sum(result["compared"].values())
    return compared / max(1, compared + sum(result["not_compared"].values()))


def _rounding_errors(result: Result) -> str:
    number = result["within_rounding_error"]
    return f"{number:,} ({number / max(1, result['decisions']):.3%})"


GRID_COLUMNS = (
    *(Column(name, name) for name in ("grid", "dtype", "cells")),
    Column("compared", _compared_share, ".1%"),
    Column("decisions", "decisions", ","),
    Column("within rounding error", _rounding_errors),
    Column("mismatches", "mismatches"),
    Column("largest logprob error", "max_logprob_error", ".1e"),
)


def proofs(folder: Path) -> str:
    """Make the table of the other kept proofs, one row per command."""
    results = {name: result for name in SUMMARIES for result in _read_all(folder, f"{name}-cuda.json")}
    rows = [(f"`{result['command']}`", SUMMARIES[name](result)) for name, result in results.items()]
    return "\n".join([*markdown(("on a GPU", "result"), rows), "", _measured_on(results.values())])


def _sampling_test(result: Result) -> str:
    rows = [test for test in result["tests"] if not test["is_control"]]
    controls = [test["is_rejected"] for test in result["tests"] if test["is_control"]]
    tokens = sum(test["tokens"] for test in rows)
    rejected = sum(test["is_rejected"] for test in rows)
    return (
        f"{len(rows)} tests of {tokens:,} tokens, {rejected} rejected; "
        f"{sum(controls)} of {len(controls)} controls (wrong on purpose, on the CPU) rejected"
    )


def _certificates(result: Result) -> str:
    exact, wrong = (_distances(result)[promise] for promise in ("lossless", "wrong"))
    return (
        f"{exact.count(0)} of {len(exact)} lossless cases have exactly the target's distribution; "
        f"{len(wrong) - wrong.count(0)} of {len(wrong)} controls (wrong on purpose) have another"
    )


def _conformance(result: Result) -> str:
    outcomes = result["outcomes"]
    count = Counter(outcome["status"] for outcome in outcomes)
    wrong = sum(not outcome["passed"] for outcome in outcomes)
    return f"{len(outcomes)} cases: {count['equal']} equal, {count['refused']} refused, {wrong} wrong"


def _soak(result: Result) -> str:
    numbers = result["figures"]
    audited = f"{numbers['slots audited']:,} slots audited"
    return f"{numbers['requests']:,} requests, {audited}, {numbers['mismatches']} mismatches"


SUMMARIES: dict[str, Callable[[Result], str]] = {
    "sampling-test": _sampling_test,
    "certify": _certificates,
    "faults": lambda run: f"{run['detected_as_named']} of {run['faults']} injected faults detected by a named field",
    "conformance": _conformance,
    "soak": _soak,
}


def performance(folder: Path) -> str:
    """Make the tables of the kept benchmark rows with targets, and of all baselines; empty without any."""
    return _bench_tables(folder, only_targets=True)


def bench_page(folder: Path) -> str:
    """Make the page of all kept benchmark rows."""
    return f"{PAGE_HEAD}{_bench_tables(folder, only_targets=False)}\n"


def _bench_tables(folder: Path, only_targets: bool) -> str:
    results = _read_all(folder, "bench-*.json")
    results.sort(key=lambda result: (SUITE_ORDER.index(result["suite"]), result["shape"]))
    lines = []
    for result in results:
        is_whole = not only_targets or result["suite"] in WHOLE_SUITES
        rows = [row for row in result["rows"] if is_whole or row["targets"]]
        served = [row for row in rows if "tokens_per_s" in row.get("figures", {})]
        lines += [f"`{suite_command(result)}`:", ""]
        lines += [*table(SERVING_COLUMNS, served), ""] if served else []
        lines += [*table(BENCH_COLUMNS, _bench_rows(row for row in rows if row not in served)), ""]
        missing = missing_groups(result)
        lines += [f"Not complete: {', '.join(missing)}.", ""] if missing else []
    if not lines:
        return ""
    runs = [run for result in results for run in result["runs"]]
    read = _range([f"{run['measured_peaks']['read'] / 1e12:.2f}" for run in runs])
    dense = _range([f"{run['measured_peaks']['dense'] / 1e12:.0f}" for run in runs])
    peaks = f"Measured peaks of these runs: {read} TB/s read, {dense} TFLOP/s of dense bf16."
    return "\n".join([*lines, f"{_measured_on(results)} {peaks}"])


def _range(numbers: Iterable[str]) -> str:
    distinct = sorted(set(numbers))
    return " to ".join(dict.fromkeys((distinct[0], distinct[-1])))


def _bench_rows(rows: Iterable[Result]) -> Iterator[Result]:
    """Yield a row per setting; an operation with more than MAX_ROWS settings has its best, median and worst."""
    operations: dict[str, list[Result]] = defaultdict(list)
    for row in rows:
        operations[row["name"]].append(row)
    for settings in operations.values():
        bounded = (row for row in settings if row["time_over_bound"] is not None)
        ranked = sorted(bounded, key=lambda row: row["time_over_bound"])
        if len(settings) <= MAX_ROWS or not ranked:
            yield from settings
            continue
        reached = sum(all(target["reached"] for target in row["targets"]) for row in ranked)
        share = f"; {reached} of {len(ranked)} settings reach all targets" if ranked[-1]["targets"] else ""
        yield {**ranked[0], "rank": "best: "}
        yield {**ranked[len(ranked) // 2], "rank": "median: "}
        yield {**ranked[-1], "rank": "worst: ", "share": share}


def _setting(row: Result) -> str:
    return row.get("rank", "") + ", ".join(f"{name} {value}" for name, value in row["setting"].items())


def _time(row: Result) -> str:
    timing = row["timings"].get(OURS)
    if timing:
        return f"{timing['median_us']:,.1f} ±{timing['spread'] / 2:.1f} %"
    return "equal" if row.get("checks") != {} else ""


def _target(target: Result) -> str:
    name, bracket, note = target["name"].partition(" (")
    verdict = "reached" if target["reached"] else "not reached"
    value = near(target["value"], target["limit"])
    return f"{RENAMED.get(name, name)}{bracket}{note} {value}, target {target['limit']:.2f}: {verdict}"


def _best_baseline(row: Result) -> str | None:
    baselines = {name: timing["median_us"] for name, timing in row["timings"].items() if not name.startswith(OURS)}
    best = min(baselines, key=baselines.__getitem__, default=None)
    return best and f"{baselines[best]:,.1f} ({best})"


def _predicted(row: Result, name: str, digits: int) -> str | None:
    """Write a predicted figure of a served load with its error."""
    measured, predicted = (row["figures"].get(key) for key in (name, f"predicted_{name}"))
    return predicted and f"{predicted:,.{digits}f} ({predicted / measured - 1:+.1%})"


BENCH_COLUMNS = (
    Column("operation", lambda row: RENAMED.get(row["name"], row["name"])),
    Column("setting", _setting),
    Column("ours, us", _time),
    Column("roofline, us", lambda row: row["time_over_bound"] and row["roofline_bound_us"], ",.1f"),
    Column("ours / roofline", "time_over_bound", ".2f"),
    Column("target", lambda row: "; ".join(map(_target, row["targets"])) + row.get("share", "")),
    Column("best baseline, us", _best_baseline),
)
SERVING_COLUMNS = (
    Column("load", _setting),
    Column("tokens/s", lambda row: row["figures"]["tokens_per_s"], ",.0f"),
    Column("predicted", lambda row: _predicted(row, "tokens_per_s", 0)),
    Column("TPOT, ms", lambda row: row["figures"]["tpot_ms"], ",.2f"),
    Column("predicted", lambda row: _predicted(row, "tpot_ms", 2)),
    Column("TTFT, ms", lambda row: row["figures"]["ttft_ms"], ",.1f"),
    Column("predicted", lambda row: _predicted(row, "ttft_ms", 1)),
    Column("GPU busy while decoding", lambda row: row["figures"].get("gpu_busy"), ".1%"),
    Column("overlap / sync", lambda row: row["figures"].get("gain_over_sync"), ".3f"),
)


def _measured_on(results: Iterable[Result]) -> str:
    """Write the sentence with machine, versions and day of every run, and one about stale results."""
    results = list(results)
    machines = sorted({_machine(run, _gpus(result)) for result in results for run in runs_of(result)})
    dated = f"Measured on {'; '.join(machines)} (`fast/measurements/`)."
    old = sorted(filter(None, map(_stale_part, results)))
    return f"{dated} **Stale**, since code that they ran has changed: {', '.join(old)}." if old else dated


def _machine(run: Result, gpus: str) -> str:
    versions = run["versions"]
    return f"{gpus} {versions['gpu']}, torch {versions['torch']}, triton {versions['triton']}, {run['date'][:10]}"


def _gpus(result: Result) -> str:
    """Write how many GPUs the ranks of a result had."""
    count = max((row["setting"].get("GPUs", 1) for row in result.get("rows", ())), default=1)
    return "one" if count == 1 else f"{count} x"


def _stale_part(result: Result) -> str:
    """Name a stale result in a sentence: its command, or its suite and which groups are stale; empty for another."""
    runs = runs_of(result)
    old = [run for run in runs if changed_modules(run)]
    if not old:
        return ""
    if "suite" not in result:
        return f"`{result['command']}`"
    groups = ", ".join(group for run in old for group in run["finished"])
    return f"`{suite_command(result)}`" + (f" ({groups})" if len(old) < len(runs) else "")
