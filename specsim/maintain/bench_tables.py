"""Results of whole suites on GPUs: kept as JSON beside the kernels, a page of them there, and README's tables.

python -m specsim.maintain.bench_tables [results of specsim bench --json ...: whole suites, or all groups of one]
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.bench.row import OURS
from specsim.bench.suites import SUITES, Options
from specsim.core.errors import InputError
from specsim.maintain.measurements import KEPT, as_command, markdown, measured_on, placed, read, rewrite
from specsim.maintain.measurements import keep as keep_value

MARK, PAGE = "performance", "README.md"
ORDER = ("round", "kernels", "scale", "baselines")
MOST_ROWS = 8  # of one name that are shown one by one
HEADINGS = ("operation", "setting", "ours, us", "floor, us", "ours / floor", "asked", "best other, us")


def keep(paths: Sequence[Path]) -> list[Path]:
    """Keep what suites came to, each in one run or in several by groups of rows.

    Refused are a part of a suite, a quick run, one with a failed check, and runs of different versions. Rows of a group
    that time cut off are left out: those of its whole run stand for it.
    """
    values: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for path in paths:
        value = read(path, "suite", "shape", "finished", "is_quick", "passed", "versions", "ceilings", "rows")
        for fault in _faults(value):
            raise InputError("file", str(path), f"the result of a whole suite that passed, and not {fault}")
        values.setdefault((value["suite"], value["shape"]), []).append(value)
    return [_keep(suite, shape, runs) for (suite, shape), runs in values.items()]


def _faults(value: Mapping[str, Any]) -> Iterator[str]:
    if value["is_quick"]:
        yield "a quick run"
    if not value["passed"]:
        yield "rows that are not equal"
    if value["suite"] not in SUITES:
        yield "a suite that there is not"
    if not re.fullmatch(r"[\w.-]+", value["shape"]):
        yield "one of a shape without a name"


def _keep(suite: str, shape: str, runs: Sequence[Mapping[str, Any]]) -> Path:
    finished = [group for run in runs for group in run["finished"]]
    if sorted(finished) != sorted(SUITES[suite].groups):
        raise InputError(suite, ", ".join(finished), f"each of its groups once: {', '.join(SUITES[suite].groups)}")
    if any(run["versions"] != runs[0]["versions"] for run in runs):
        raise InputError(suite, "runs of different versions", "runs of one")
    names = ("command", "date", "versions", "ceilings", "seconds", "finished")
    value = {
        "suite": suite,
        "shape": shape,
        "runs": [{name: run[name] for name in names} for run in runs],
        "rows": [row for run in runs for row in run["rows"][: len(run["rows"]) - run.get("unfinished", 0)]],
    }
    suffix = "" if shape == Options(suite).shape else f"-{shape}"
    return keep_value(KEPT / f"bench-{suite}{suffix}.json", value)


def table() -> str:
    """README's tables of the kept results in Markdown: what is asked, and the peers; nothing where none is kept."""
    return _tables(lambda value, row: value["suite"] == "baselines" or row["asked"])


def page() -> str:
    """A page of all kept results in Markdown."""
    return "# Measured on GPUs\n\nWritten by `python -m specsim.maintain.bench_tables`.\n\n" + _tables(
        lambda value, row: True
    )


def _tables(is_shown: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]) -> str:
    values = [read(path) for path in KEPT.glob("bench-*.json")]
    values.sort(key=lambda value: (ORDER.index(value["suite"]), value["shape"]))
    lines, runs = [], [run for value in values for run in value["runs"]]
    for value in values:
        rows = [row for row in value["rows"] if is_shown(value, row)]
        lines += [f"`{_command(value)}`:", "", *markdown(HEADINGS, _rows(rows)), ""]
    if not lines:
        return ""
    rates = [f"{_range(runs, 'read', 1e12, 2)} TB/s read", f"{_range(runs, 'dense', 1e12, 0)} TFLOP/s of dense bf16"]
    return "\n".join([*lines, f"{measured_on(runs)} Ceilings in these runs: {', '.join(rates)}."]) + "\n"


def _command(value: Mapping[str, Any]) -> str:
    """What runs the whole suite."""
    is_usual = value["shape"] == Options(value["suite"]).shape
    return f"specsim bench --suite {value['suite']}" + ("" if is_usual else f" --shape {value['shape']}")


def _range(runs: Sequence[Mapping[str, Any]], name: str, unit: float, digits: int) -> str:
    """The least and the largest of a ceiling."""
    found = sorted({f"{run['ceilings'][name] / unit:.{digits}f}" for run in runs})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """A line for every row; of rows that differ in their setting only, where there are many, the worst and the best."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    for rows in groups.values():
        timed = [row for row in rows if row["ratio"] is not None]
        if len(rows) > MOST_ROWS and timed:
            yield from _summary(sorted(timed, key=lambda row: row["ratio"]))
        else:
            yield from map(_cells, rows)


def _summary(ranked: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The best, the median and the worst of many rows, and at how many of them all is met that is asked."""
    met = sum(all(each["met"] for each in row["asked"]) for row in ranked)
    yield _cells(ranked[0], "best: ")
    yield _cells(ranked[len(ranked) // 2], "median: ")
    cells = _cells(ranked[-1], "worst: ")
    if ranked[-1]["asked"]:
        cells[5] += f"; all that is asked is met at {met} of {len(ranked)} points"
    yield cells


def _cells(row: Mapping[str, Any], which: str = "") -> list[str]:
    timing = row["timings"].get(OURS)
    ours = f"{timing['median_us']:,.1f} ±{timing['spread'] / 2:.1f} %" if timing else "equal"
    rivals = {name: each["median_us"] for name, each in row["timings"].items() if not name.startswith(OURS)}
    best = min(rivals, key=rivals.__getitem__, default=None)
    setting = ", ".join(f"{name} {each}" for name, each in row["setting"].items())
    has_floor = row["ratio"] is not None
    return [
        row["name"],
        which + setting,
        ours,
        f"{row['floor_us']:,.1f}" if has_floor else "",
        f"{row['ratio']:.2f}" if has_floor else "",
        "; ".join(_asked(each) for each in row["asked"]),
        f"{rivals[best]:,.1f} ({best})" if best else "",
    ]


def _asked(each: Mapping[str, Any]) -> str:
    return f"{each['what']} {each['value']:.2f} {'≤' if each['met'] else '**above**'} {each['limit']:.2f}"


def written(readme: str) -> str:
    """The README with the tables in their place."""
    return placed(readme, MARK, table())


def main(paths: Sequence[str]) -> None:
    """Keep these results and write the tables."""
    for path in keep([Path(path) for path in paths]):
        print(path)
    rewrite(MARK, table())
    (KEPT / PAGE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    as_command(main, sys.argv[1:])
