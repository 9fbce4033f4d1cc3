"""Benchmark reports: what clients write or print, or published tables with metric and value columns."""

from pathlib import Path

from specsim.core.errors import require
from specsim.core.files import read_text
from specsim.core.table import read_table
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
    table = read_table(text, "file", str(path))
    allowed = "a CSV of at least one row, with columns metric and value"
    require({"metric", "value"} <= set(table.columns), "file", str(path), allowed)
    figures: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    limits: dict[tuple[tuple[str, str], ...], int] = {}
    for row in table.rows:
        metric = row.fields["metric"]
        require(metric in METRICS, "metric", metric, f"{', '.join(METRICS)} (in {row.place})")
        key = tuple((name, text) for name, text in row.fields.items() if name not in ("metric", "value"))
        run = figures.setdefault(key, {})
        require(metric not in run, "metric", metric, f"one value of it a run (in {row.place})")
        run[metric] = row.number("value")
        if "concurrency" in table.columns:
            limits[key] = row.integer("concurrency", 1)
    require(figures, "file", str(path), allowed)
    return [
        Report(" · ".join(text for _, text in key) or "the run", run, limits.get(key)) for key, run in figures.items()
    ]
