"""Pareto chart: a server's throughput and that of each request, for a sweep's settings over loads."""

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.core.errors import require, require_type
from specsim.plots.chart import LINES, SIZE, label_point, new_chart
from specsim.plots.sheet import ACCEPTED, FAINT, FONT, Axes, Picture

Row = Mapping[str, Any]
_FIGURES = {"model", "hardware", "concurrency", "rate", "Mean TPOT (ms)", "Output Throughput (tok/s)"}


def pareto(rows: Sequence[Row]) -> Picture:
    """Draw the server's tokens a second over those of one request (1 / TPOT), a line per setting.

    rows: of specsim.simulator.sweep.Results; those without a TPOT (impossible, or of one token per request) are left
    out. The number at a point is its clients; a ring marks the Pareto front. InputError for no row, or more than five
    settings.
    """
    allowed = "rows of specsim.simulator.sweep.Results"
    require_type("rows", rows, Sequence, allowed)
    require(all(isinstance(row, Mapping) and _FIGURES.issubset(row) for row in rows), "rows", "others", allowed)
    rows = [row for row in rows if row["Mean TPOT (ms)"]]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_setting(row), []).append(row)
    require(1 <= len(lines) <= len(LINES), "settings", len(lines), f"1 to {len(LINES)}, of cells with a TPOT")
    where = " and ".join(sorted({f"{row['model']} on {row['hardware']}" for row in rows}))
    figure, axes = new_chart(f"{where}, simulated", "tokens a second of a request", "tokens a second of all")
    for (name, own), (color, dash) in zip(lines.items(), LINES, strict=False):
        _line(axes, name, sorted(own, key=lambda row: (row["concurrency"], row["rate"] or 0)), color, dash)
    for row in front(rows):
        ring = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": ACCEPTED.edge}
        axes.plot([each(row)], [everyone(row)], "o", gid=f"front:{row['key']}", **ring)
    axes.legend(loc="lower left", frameon=False, handlelength=3, prop={"family": FONT, "size": SIZE})
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure


def _line(axes: Axes, name: str, rows: list[Row], color: str, dash: Any) -> None:
    look = {"color": color, "linestyle": dash, "marker": "o", "markersize": 3.5}
    axes.plot([each(row) for row in rows], [everyone(row) for row in rows], label=name, gid=f"setting:{name}", **look)
    for row in rows if rows[0]["rate"] is None else []:
        label_point(axes, each(row), everyone(row), f"{row['concurrency']}", FAINT, (6, 5))


def front(rows: Sequence[Row]) -> list[Row]:
    """Find the Pareto front of rows with a TPOT: each beats every other row in one of the figures."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (-each(row), -everyone(row))):
        if not kept or everyone(row) > everyone(kept[-1]):
            kept.append(row)
    return kept


def each(row: Row) -> float:
    """Compute the tokens a second of one request after its first token."""
    return 1e3 / row["Mean TPOT (ms)"]


def everyone(row: Row) -> float:
    """Look up the tokens a second of the server."""
    return row["Output Throughput (tok/s)"]


def _setting(row: Row) -> str:
    topk, steps, nodes = (row[name] for name in ("topk", "num_steps", "num_draft_tokens"))
    if not steps:
        return "no drafts"
    return f"chain of {steps}" if topk == 1 else f"tree {topk}/{steps}/{nodes}"
