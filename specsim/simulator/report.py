"""Benchmark reports: files that clients write, text that they print, also within a log, or published tables."""

import re
from collections.abc import Iterator
from pathlib import Path

from specsim.core.errors import InputError, require
from specsim.core.files import read_text
from specsim.core.limits import parse_number, read_integer, read_number
from specsim.core.table import read_table
from specsim.simulator.client_results import is_summary
from specsim.simulator.measurement import Report, read_results
from specsim.simulator.results import LATENCIES, METRICS, SPECULATION, STATISTICS, THROUGHPUTS

_HEADER = " Serving Benchmark Result "
_GAP = re.compile(r":[ \t]")  # between the name and the figure of a line
_POSITION = re.compile(r"position \d+")
HALF_UNIT = 0.005  # figures are printed with two decimals
_FIGURES = {
    "output token throughput (tok/s)": THROUGHPUTS[0],
    "request throughput (req/s)": THROUGHPUTS[1],
    "total token throughput (tok/s)": THROUGHPUTS[2],
    "acceptance length": SPECULATION[0],
    "accept length": SPECULATION[0],
    "acceptance rate (%)": SPECULATION[1],
    **{f"{how} {what} (ms)".lower(): f"{how} {what} (ms)" for what in LATENCIES for how in STATISTICS},
    **{f"{how} E2EL (ms)".lower(): f"{how} E2E Latency (ms)" for how in STATISTICS},
}
_LIMITS = ("maximum request concurrency", "max request concurrency")
_RATES = ("request rate configured (rps)", "traffic request rate")


def is_printed(text: str) -> bool:
    """Whether a text holds a printed report."""
    return any(map(_is_header, text.split("\n")))


def read_printed(text: str, location: str) -> list[Report]:
    """Read the reports in a text, in order; InputError for a report without figures, or with another value as one."""
    return [_report(printed, location, run) for run, printed in enumerate(_blocks(text), start=1)]


def _blocks(text: str) -> Iterator[dict[str, str]]:
    """Yield figures by name of every report, whose lines stand between its header and a line of =."""
    block: dict[str, str] | None = None
    for line in map(str.strip, text.split("\n")):
        if _is_header(line) or (line and not line.strip("=")):
            if block is not None:
                yield block
            block = {} if _is_header(line) else None
        elif block is not None and (gap := _GAP.search(line, 1)):
            block[line[: gap.start()].lower()] = line[gap.end() :].lstrip()
    if block is not None:
        yield block


def _is_header(line: str) -> bool:
    line = line.strip()
    return line[:1] == line[-1:] == "=" and line.strip("=") == _HEADER


def _report(printed: dict[str, str], location: str, run: int) -> Report:
    figures = {ours: _number(printed, theirs, location) for theirs, ours in _FIGURES.items() if theirs in printed}
    if not figures:
        raise InputError("file", location, f"a result of vLLM's or SGLang's benchmark (run {run} has no figures)")
    positions = [name for name in printed if _POSITION.fullmatch(name)]
    return Report(
        f"{'sglang' if 'backend' in printed else 'vllm'}, run {run}",
        {name: value for name, value in figures.items() if value is not None},
        concurrency=_count(printed, location, *_LIMITS),
        duration=_number(printed, "benchmark duration (s)", location),
        completed=_count(printed, location, "successful requests"),
        input_tokens=_count(printed, location, "total input tokens"),
        output_tokens=_count(printed, location, "total generated tokens"),
        rates_by_position=tuple((_number(printed, name, location) or 0.0) / 100 for name in positions),
        rate=next((rate for name in _RATES if (rate := _number(printed, name, location)) is not None), None),
        num_rounds=_count(printed, location, "drafts"),
        num_drafts=_count(printed, location, "draft tokens"),
        num_accepted_drafts=_count(printed, location, "accepted tokens"),
        mean_in_flight=_number(printed, "concurrency", location),
        rounding=HALF_UNIT,
    )


def _count(printed: dict[str, str], location: str, *names: str) -> int | None:
    """Read the count of the first of these lines that exists."""
    for name in names:
        if (text := _text(printed, name)) is not None:
            return read_integer(parse_number(text), name, location)
    return None


def _number(printed: dict[str, str], name: str, location: str) -> float | None:
    """Read the number of a line; None without the line, or where it names no limit."""
    text = _text(printed, name)
    return None if text is None else read_number(parse_number(text), name, location)


def _text(printed: dict[str, str], name: str) -> str | None:
    """Look up the text of a line; None without the line, or where it names no limit."""
    text = printed.get(name)
    return None if text is None or text.lower() in ("not set", "none", "inf", "trace") else text


def read_reports(path: Path) -> list[Report]:
    """Read the reports in a file: a CSV with columns metric and value, or the output of a client.

    Output is what a client writes, or the text that it prints, also within a log. The other columns of a CSV name the
    run; `concurrency` is read. InputError for any other file.
    """
    text = read_text(path, "file", "a UTF-8 file that can be read")
    if path.suffix.lower() == ".csv" and not is_summary(text):
        return _table(text, path)
    return read_printed(text, str(path)) if is_printed(text) else read_results(path)


def _table(text: str, path: Path) -> list[Report]:
    table = read_table(text, "file", str(path))
    allowed = "a CSV of at least one row, with columns metric and value (specsim calibrate reads tables of batches)"
    require({"metric", "value"} <= set(table.columns), "file", str(path), allowed)
    figures: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    limits: dict[tuple[tuple[str, str], ...], int] = {}
    for row in table.rows:
        metric = row.fields["metric"]
        require(metric in METRICS, "metric", metric, f"{', '.join(METRICS)} (in {row.location})")
        key = tuple((name, text) for name, text in row.fields.items() if name not in ("metric", "value"))
        run = figures.setdefault(key, {})
        require(metric not in run, "metric", metric, f"one value of it a run (in {row.location})")
        run[metric] = row.number("value")
        if "concurrency" in table.columns:
            limits[key] = row.integer("concurrency", 1)
    require(figures, "file", str(path), allowed)
    return [
        Report(" · ".join(text for _, text in key) or "the run", run, limits.get(key)) for key, run in figures.items()
    ]
