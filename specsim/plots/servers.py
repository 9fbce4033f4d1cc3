"""Charts of simulated servers: speed-up by batch size, roofline, timeline of requests, and Pareto front of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Annotated, Any

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_int, require_type
from specsim.core.limits import MOST_TOKENS, BatchSize, NumberRange
from specsim.plots.sheet import (
    ACCEPTED,
    CHART_WIDTH,
    EM,
    FAINT,
    FONT,
    INK,
    LINES,
    SIZE,
    SPARE,
    Axes,
    End,
    Picture,
    label_ends,
    label_point,
    new_chart,
)
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.forward import Forward
from specsim.simulator.results import SimulatedRun
from specsim.simulator.scenario import LARGEST_BATCH, Scenario, calibration, speedup_range


@check_arguments
def speedup(scenarios: Mapping[str, Scenario], most: BatchSize = LARGEST_BATCH) -> Picture:
    """Draw the speed-up over plain decoding against running requests, a line per scenario, its crossover marked.

    A band around each line is its range under the parameters that fits to published tables found.
    InputError for no scenario, for more than five, and for one that does not draft.
    """
    require(1 <= len(scenarios) <= len(LINES), "scenarios", len(scenarios), f"1 to {len(LINES)}")
    for name, scenario in scenarios.items():
        require_type("scenarios", scenario, Scenario, "Scenarios of specsim.simulator.scenario")
        require(not scenario.option.config.is_plain, "scenarios", name, "scenarios that draft")
    figure, axes = new_chart("speed-up of decoding", "running requests", names=scenarios)
    sizes = [size for size in range(1, most + 1) if size <= 16 or size % 8 == 0]
    ends = []
    crossings = []
    for (name, scenario), (color, dash) in zip(scenarios.items(), LINES, strict=False):
        ranges = [speedup_range(scenario, size) for size in sizes]
        values = [band.value for band in ranges]
        axes.plot(sizes, values, color=color, linestyle=dash, linewidth=1.8, gid=f"speedup:{name}")
        edges = ([band.lowest for band in ranges], [band.highest for band in ranges])
        axes.fill_between(sizes, *edges, color=color, alpha=0.1, linewidth=0, gid=f"range:{name}")
        ends.append(End(values[-1], sizes[-1], name, color))
        if size := scenario.crossover(most):
            crossings.append(End(1.0, size, name, color))
    _mark(axes, crossings)
    axes.axhline(1, color=FAINT, linewidth=0.8, zorder=1, gid="even")
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, sizes[-1])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    ticks = [2**power for power in range(0, sizes[-1].bit_length(), 2)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    label_ends(axes, ends)
    words = "; ".join(dict.fromkeys(map(calibration, scenarios.values())))
    _say(axes, f"{words}; bands: with the parameters of servers in published tables")
    return figure


def _say(axes: Axes, text: str) -> None:
    """Write a text at the foot of the axes, where no speed-up is drawn."""
    width = int(0.95 * axes.get_position().width * CHART_WIDTH / (SIZE * EM))  # characters of a line
    axes.text(0.01, 0.02, fill(text, width), transform=axes.transAxes, va="bottom",
              color=INK, family=FONT, fontsize=SIZE, parse_math=False)  # fmt: skip


def _mark(axes: Axes, crossings: list[End]) -> None:
    """Mark the batch where each line falls below 1, its number above and below the line by turns."""
    for index, (_, size, name, color) in enumerate(sorted(crossings)):
        axes.plot([size], [1], "o", color=color, markersize=5, gid=f"crossover:{name}:{size}")
        offset = (3, -12) if index % 2 else (3, 5)
        axes.annotate(str(size), (size, 1), offset, textcoords="offset points", color=color, fontsize=SIZE)


MOST_ROWS = 4096
IDEAL = Efficiency(bandwidth=1.0, compute=1.0, overlap=1.0, experts=1.0, mxfp4_experts=1.0, gap=0.0, collective=0.0)


@check_arguments
def roofline(
    scenario: Scenario,
    most: Annotated[int, NumberRange(2, MOST_TOKENS)] = MOST_ROWS,
    marks: Mapping[str, int] | None = None,
) -> Picture:
    """Draw the milliseconds of the target's forward pass against its tokens, those of all requests together.

    The bound is the longer of reading the weights once and of the arithmetic, both at the GPU's peak. Where the curve
    is flat, more tokens cost next to nothing, which is why verifying drafts pays. marks: names of numbers of tokens,
    such as requests times num_draft_tokens. Attention to the prefix is left out. InputError for a mark beyond `most`.
    """
    marks = {} if marks is None else marks
    for name, size in marks.items():
        require_int(name, size, 1, most)
    require(len(marks) <= len(LINES), "marks", len(marks), f"at most {len(LINES)}")
    target_forward = Forward(scenario.hardware, scenario.model, scenario.efficiency, scenario.tensor_parallel)
    rows = np.unique(np.geomspace(1, most, 96).astype(int))
    curves = {"forward pass": target_forward, "bound": replace(target_forward, efficiency=IDEAL)}
    title = f"{scenario.model.name} on {scenario.hardware.name}, simulated"
    figure, axes = new_chart(title, "tokens of a forward pass", "milliseconds", names=curves)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for (name, forward), (color, dash) in zip(curves.items(), LINES, strict=False):
        spent = [1e3 * forward.products(size, size) for size in rows.tolist()]
        axes.plot(rows, spent, color=color, linestyle=dash, linewidth=1.8, gid=f"roofline:{name}")
        ends.append(End(spent[-1], most, name, color))
    for name, size in marks.items():
        spent = 1e3 * target_forward.products(size, size)
        axes.plot([size], [spent], "o", color=LINES[0][0], markersize=5, gid=f"mark:{name}")
        axes.annotate(name, (size, spent), (-5, 7), textcoords="offset points", ha="right",
                      color=FAINT, family=FONT, fontsize=SIZE, parse_math=False)  # fmt: skip
    axes.set_xlim(1, most)
    ticks = [4**power for power in range((most.bit_length() + 1) // 2)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    label_ends(axes, ends)
    return figure


MOST = 200


@check_arguments
def batch(run: SimulatedRun, first: int = 0, last: int | None = None) -> Picture:
    """Draw a bar per request in seconds: from sending to its first token, and to its last.

    Requests first to last by number (None: the end); InputError for none of them, or more than 200. A cross marks a
    preempted request.
    """
    numbers = range(len(run.arrivals))[first : None if last is None else last + 1]
    require(1 <= len(numbers) <= MOST, "requests", len(numbers), f"1 to {MOST} of them")
    height = 1.2 + 0.12 * max(len(numbers), 8)
    title = f"requests {numbers[0]} to {numbers[-1]}, simulated: waiting, then decoding"
    figure, axes = new_chart(title, "seconds", "request", height)
    for number in numbers:
        sent = float(run.arrivals[number])
        begun = float(run.firsts[number])
        ended = float(run.lasts[number])
        for start, end, look, kind in ((sent, begun, SPARE, "wait"), (begun, ended, ACCEPTED, "decode")):
            bar = axes.barh(number, end - start, left=start, height=0.7, color=look.face, edgecolor=look.edge, lw=0.6)
            bar[0].set_gid(f"{kind}:{number}")
        if run.preemptions[number]:
            axes.plot([begun], [number], "x", color="#A2487D", markersize=5, gid=f"preempted:{number}")
    axes.set_ylim(numbers[-1] + 0.6, numbers[0] - 0.6)
    axes.set_yticks([numbers[0], numbers[-1]])
    axes.set_xlim(left=min(0.0, float(run.arrivals[numbers[0]])) if first == 0 else None)
    axes.text(1, 1.01, f"{run.duration:.2f} s, {run.num_steps:,} steps in all", ha="right", va="bottom",
              transform=axes.transAxes, family=FONT, fontsize=SIZE)  # fmt: skip
    return figure


Row = Mapping[str, Any]
_SETTING = ("topk", "num_steps", "num_draft_tokens")
_LOAD = ("key", "model", "hardware", "concurrency", "rate")
_FIGURES = {*_LOAD, *_SETTING, "Mean TPOT (ms)", "Output Throughput (tok/s)"}


@check_arguments
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
    for (name, setting_rows), (color, dash) in zip(lines.items(), LINES, strict=False):
        _line(axes, name, sorted(setting_rows, key=lambda row: (row["concurrency"], row["rate"] or 0)), color, dash)
    for row in front(rows):
        ring = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": ACCEPTED.edge}
        axes.plot([request_speed(row)], [server_speed(row)], "o", gid=f"front:{row['key']}", **ring)
    axes.legend(loc="lower left", frameon=False, handlelength=3, prop={"family": FONT, "size": SIZE})
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure


def _line(axes: Axes, name: str, rows: list[Row], color: str, dash: Any) -> None:
    look = {"color": color, "linestyle": dash, "marker": "o", "markersize": 3.5}
    axes.plot(
        [request_speed(row) for row in rows],
        [server_speed(row) for row in rows],
        label=name,
        gid=f"setting:{name}",
        **look,
    )
    for row in rows if rows[0]["rate"] is None else []:
        label_point(axes, request_speed(row), server_speed(row), f"{row['concurrency']}", FAINT, (6, 5))


def front(rows: Sequence[Row]) -> list[Row]:
    """Find the Pareto front of rows with a TPOT: each beats every other row in one of the figures."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (-request_speed(row), -server_speed(row))):
        if not best or server_speed(row) > server_speed(best[-1]):
            best.append(row)
    return best


def request_speed(row: Row) -> float:
    """Compute the tokens a second of one request after its first token."""
    return 1e3 / row["Mean TPOT (ms)"]


def server_speed(row: Row) -> float:
    """Look up the tokens a second of the server."""
    return row["Output Throughput (tok/s)"]


def _setting(row: Row) -> str:
    topk, steps, nodes = (row[name] for name in _SETTING)
    if not steps:
        return "no drafts"
    return f"chain of {steps}" if topk == 1 else f"tree {topk}/{steps}/{nodes}"
