"""Markdown tables of kept GPU results: differential grids, other proofs, and benchmark suites."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.bench.row import OURS
from specsim.bench.suites import SUITES, Options
from specsim.core.display import near
from specsim.core.provenance import PRINTING, code_digests

Result = Mapping[str, Any]  # as a command wrote it with --json
GRID_HEADINGS = (
    "grid",
    "dtype",
    "cells",
    "compared",
    "decisions",
    "within rounding error",
    "mismatches",
    "largest logprob error",
)
BENCH_HEADINGS = ("operation", "setting", "ours, us", "roofline, us", "ours / roofline", "target", "best baseline, us")
SERVING_HEADINGS = (
    "load",
    "tokens/s",
    "predicted",
    "TPOT, ms",
    "predicted",
    "TTFT, ms",
    "predicted",
    "GPU busy while decoding",
    "overlap / sync",
)
SUITE_ORDER = (
    "round",
    "persistent",
    "kernels",
    "experts",
    "scale",
    "baselines",
    "adaptive",
    "serving",
    "tensor-parallel",
)
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


def markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Make the lines of a Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(map(str, cells)) + " |" for cells in rows]


def prompts_of(setting: Mapping[str, Any]) -> str:
    """Name the prompts of a setting of `specsim accept`; results from before there were edits do not say."""
    return "edits" if setting.get("prompt_set") == "edits" else "held-out"


def grids(folder: Path) -> str:
    """Make the table of the kept differential grids, with the machine and versions of their runs."""
    results = _read_all(folder, "diff-*.json")
    results.sort(key=lambda result: (result["num_cells"], result["dtype"] != "float32"))
    return "\n".join([*markdown(GRID_HEADINGS, map(_grid_cells, results)), "", _measured_on(results)]) + "\n"


def proofs(folder: Path) -> str:
    """Make the table of the other kept proofs, one row per command."""
    results = {name: result for name in SUMMARIES for result in _read_all(folder, f"{name}-cuda.json")}
    rows = [(f"`{result['command']}`", SUMMARIES[name](result)) for name, result in results.items()]
    return "\n".join([*markdown(("on a GPU", "result"), rows), "", _measured_on(results.values())]) + "\n"


def performance(folder: Path) -> str:
    """Make the tables of the kept benchmark rows with targets, and of all baselines; empty without any."""
    return _bench_tables(folder, only_targets=True)


def bench_page(folder: Path) -> str:
    """Make the page of all kept benchmark rows."""
    return PAGE_HEAD + _bench_tables(folder, only_targets=False)


def _read_all(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(pattern)]


def changed_modules(result: Result) -> list[str]:
    """List the modules whose code has changed since the result, or all where it has no digests."""
    return sorted({name for run in result.get("runs", [result]) for name in _changed(run)})


def _changed(run: Result) -> set[str]:
    """Find the changed modules of a run; a module that is new to it is imported by a changed one."""
    now, then = code_digests(), run["versions"].get("code")
    return set(now) if then is None else {name for name in {*then} - PRINTING if now.get(name) != then[name]}


def stale(folder: Path) -> dict[str, list[str]]:
    """List kept results whose code has changed, by file name, with the changed modules."""
    changed = {
        path.name: changed_modules(json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))
    }
    return {name: modules for name, modules in changed.items() if modules}


def _measured_on(results: Iterable[Result]) -> str:
    """Write the sentence with machine, versions and day of every run, and one about stale results."""
    results = list(results)
    dated = _runs((run, _gpus(result)) for result in results for run in result.get("runs", [result]))
    old = sorted(filter(None, map(_stale_part, results)))
    return f"{dated} **Stale**, since code that they ran has changed: {', '.join(old)}." if old else dated


def _stale_part(result: Result) -> str:
    """Name a stale result in a sentence: its command, or its suite and which groups are stale; empty for another."""
    runs = result.get("runs", [result])
    old = [run for run in runs if _changed(run)]
    if not old:
        return ""
    if "suite" not in result:
        return f"`{result['command']}`"
    groups = ", ".join(group for run in old for group in run["finished"])
    return f"`{suite_command(result)}`" + (f" ({groups})" if len(old) < len(runs) else "")


def missing_groups(result: Result) -> list[str]:
    """List the groups of a kept suite that none of its runs has finished."""
    finished = {group for run in result["runs"] for group in run["finished"]}
    return [group for group in SUITES[result["suite"]].groups if group not in finished]


def suite_command(result: Result) -> str:
    """Write the command that runs a kept suite."""
    option = "" if result["shape"] == Options(result["suite"]).shape else f" --shape {result['shape']}"
    return f"specsim bench --suite {result['suite']}{option}"


def _gpus(result: Result) -> str:
    """Write how many GPUs the ranks of a result had."""
    count = max((row["setting"].get("GPUs", 1) for row in result.get("rows", ())), default=1)
    return "one" if count == 1 else f"{count} x"


def _runs(results: Iterable[tuple[Result, str]]) -> str:
    runs = {
        f"{gpus} {run['versions']['gpu']}, torch {run['versions']['torch']}, triton {run['versions']['triton']}, "
        f"{run['date'][:10]}"
        for run, gpus in results
    }
    return f"Measured on {'; '.join(sorted(runs))} (`fast/measurements/`)."


def _grid_cells(result: Result) -> list[Any]:
    compared = sum(result["compared"].values())
    total = max(1, compared + sum(result["not_compared"].values()))
    share = result["within_rounding_error"] / max(1, result["decisions"])
    return [
        result["grid"],
        result["dtype"],
        result["cells"],
        f"{compared / total:.1%}",
        f"{result['decisions']:,}",
        f"{result['within_rounding_error']:,} ({share:.3%})",
        result["mismatches"],
        f"{result['max_logprob_error']:.1e}",
    ]


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
    distances = defaultdict(list)
    for certificate in result["certificates"]:
        distances[certificate["promise"]].append(certificate["total_variation_float"])
    exact = distances["lossless"]
    wrong = distances["wrong"]
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
    figures = result["figures"]
    audited = f"{figures['slots audited']:,} slots audited"
    return f"{figures['requests']:,} requests, {audited}, {figures['mismatches']} mismatches"


SUMMARIES: dict[str, Callable[[Result], str]] = {
    "sampling-test": _sampling_test,
    "certify": _certificates,
    "faults": lambda each: f"{each['detected_as_named']} of {each['faults']} injected faults detected by a named field",
    "conformance": _conformance,
    "soak": _soak,
}


def _bench_tables(folder: Path, only_targets: bool) -> str:
    results = _read_all(folder, "bench-*.json")
    results.sort(key=lambda result: (SUITE_ORDER.index(result["suite"]), result["shape"]))
    lines = []
    for result in results:
        is_whole = not only_targets or result["suite"] in WHOLE_SUITES
        rows = [row for row in result["rows"] if is_whole or row["targets"]]
        title = f"`{suite_command(result)}`:"
        served = [row for row in rows if "tokens_per_s" in row.get("figures", {})]
        lines += [title, ""]
        lines += [*markdown(SERVING_HEADINGS, map(_serving_cells, served)), ""] if served else []
        lines += [*markdown(BENCH_HEADINGS, _bench_rows(row for row in rows if row not in served)), ""]
        missing = missing_groups(result)
        lines += [f"Not complete: {', '.join(missing)}.", ""] if missing else []
    if not lines:
        return ""
    runs = [run for result in results for run in result["runs"]]
    read = _range([f"{run['measured_peaks']['read'] / 1e12:.2f}" for run in runs])
    dense = _range([f"{run['measured_peaks']['dense'] / 1e12:.0f}" for run in runs])
    peaks = f"Measured peaks of these runs: {read} TB/s read, {dense} TFLOP/s of dense bf16."
    return "\n".join([*lines, f"{_measured_on(results)} {peaks}"]) + "\n"


def _serving_cells(row: Result) -> list[str]:
    """Make the cells of a served load, with each prediction's error."""
    figures = row["figures"]
    cells = [", ".join(f"{name} {value}" for name, value in row["setting"].items())]
    for name, digits in {"tokens_per_s": 0, "tpot_ms": 2, "ttft_ms": 1}.items():
        measured, predicted = figures[name], figures.get(f"predicted_{name}")
        cells.append(f"{measured:,.{digits}f}")
        cells.append("" if predicted is None else f"{predicted:,.{digits}f} ({predicted / measured - 1:+.1%})")
    cells.append(f"{figures['gpu_busy']:.1%}" if "gpu_busy" in figures else "")
    cells.append(f"{figures['gain_over_sync']:.3f}" if "gain_over_sync" in figures else "")
    return cells


def _range(figures: Iterable[str]) -> str:
    distinct = sorted(set(figures))
    return " to ".join(dict.fromkeys((distinct[0], distinct[-1])))


def _bench_rows(rows: Iterable[Result]) -> Iterator[list[str]]:
    """Make a row per setting; an operation with more than MAX_ROWS settings has its best, median and worst."""
    operations: dict[str, list[Result]] = defaultdict(list)
    for row in rows:
        operations[row["name"]].append(row)
    for settings in operations.values():
        bounded = (row for row in settings if row["time_over_bound"] is not None)
        ranked = sorted(bounded, key=lambda row: row["time_over_bound"])
        if len(settings) > MAX_ROWS and ranked:
            yield from _best_median_worst(ranked)
        else:
            yield from map(_bench_cells, settings)


def _best_median_worst(ranked: Sequence[Result]) -> Iterator[list[str]]:
    yield _bench_cells(ranked[0], "best: ")
    yield _bench_cells(ranked[len(ranked) // 2], "median: ")
    worst = _bench_cells(ranked[-1], "worst: ")
    if ranked[-1]["targets"]:
        reached = sum(all(target["reached"] for target in row["targets"]) for row in ranked)
        worst[5] += f"; {reached} of {len(ranked)} settings reach all targets"
    yield worst


def _bench_cells(row: Result, prefix: str = "") -> list[str]:
    timing = row["timings"].get(OURS)
    baselines = {name: baseline["median_us"] for name, baseline in row["timings"].items() if not name.startswith(OURS)}
    best = min(baselines, key=baselines.__getitem__, default=None)
    has_bound = row["time_over_bound"] is not None
    return [
        _in_todays_words(row["name"]),
        prefix + ", ".join(f"{name} {value}" for name, value in row["setting"].items()),
        f"{timing['median_us']:,.1f} ±{timing['spread'] / 2:.1f} %"
        if timing
        else "equal"
        if row.get("checks") != {}
        else "",
        f"{row['roofline_bound_us']:,.1f}" if has_bound else "",
        f"{row['time_over_bound']:.2f}" if has_bound else "",
        "; ".join(map(_target, row["targets"])),
        f"{baselines[best]:,.1f} ({best})" if best else "",
    ]


def _target(target: Result) -> str:
    name, bracket, note = target["name"].partition(" (")
    verdict = "reached" if target["reached"] else "not reached"
    value = near(target["value"], target["limit"])
    return f"{_in_todays_words(name)}{bracket}{note} {value}, target {target['limit']:.2f}: {verdict}"


def _in_todays_words(name: str) -> str:
    return RENAMED.get(name, name)
