"""Benchmark reports: what clients write or print, or published tables with metric and value columns."""

import csv
import math
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path

from specsim.core.errors import InputError, require
from specsim.core.files import read_text
from specsim.simulator.measurement import METRICS, Report, read_results
from specsim.simulator.printed_report import is_printed, read_printed


def read_reports(path: Path) -> list[Report]:
    """Read the reports in a file: a CSV with columns metric and value, or the output of a client.

    Output is the JSON that vLLM's or SGLang's client writes, or the text that it prints, also within a log. The other
    columns of a CSV name the run; `concurrency` is read. InputError for any other file.
    """
    text = read_text(path, "file", "a UTF-8 file that can be read")
    if path.suffix.lower() == ".csv":
        return _table(text, path)
    return read_printed(text, str(path)) if is_printed(text) else read_results(path)


def _table(text: str, path: Path) -> list[Report]:
    runs: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for place, row in _rows(text, path):
        require(row["metric"] in METRICS, "metric", row["metric"], f"{', '.join(METRICS)} (in {place})")
        key = tuple((name, text) for name, text in row.items() if name not in ("metric", "value"))
        figures = runs.setdefault(key, {})
        require(row["metric"] not in figures, "metric", row["metric"], f"one value of it a run (in {place})")
        figures[row["metric"]] = _number("value", row["value"], place)
    require(runs, "file", str(path), "a CSV of at least one row, with columns metric and value")
    return [
        Report(" · ".join(text for _, text in key) or "the run", figures, _concurrency(dict(key), path))
        for key, figures in runs.items()
    ]


def _rows(text: str, path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield place and fields of every row; nothing for a table without the two columns."""
    rows = csv.DictReader(StringIO(text, newline=""))
    try:
        if {"metric", "value"} <= set(rows.fieldnames or ()):
            for row in rows:
                place = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise InputError("file", place, "a row with a field for each column")
                yield place, row
    except csv.Error as error:
        raise InputError("file", str(path), f"a table as CSV ({error})") from error


def _concurrency(named: Mapping[str, str], path: Path) -> int | None:
    if "concurrency" not in named:
        return None
    number = _number("concurrency", named["concurrency"], str(path))
    if number < 1 or number != int(number):
        raise InputError("concurrency", named["concurrency"], f"an integer of at least 1 (in {path})")
    return int(number)


def _number(name: str, text: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    require(0 <= number < math.inf, name, text, f"a number of at least 0 (in {place})")
    return number
