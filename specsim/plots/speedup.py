"""Speed-up of speculation as a batch grows, and the batch where it turns into a loss."""

from collections.abc import Mapping
from typing import NamedTuple

from specsim.core.errors import InputError
from specsim.plots.sheet import EM, FAINT, FONT, INK, Axes, FigureCanvasAgg, Picture
from specsim.simulator.scenario import MOST_REQUESTS, Scenario

# Hues of Okabe and Ito, each with a dash of its own.
LINES = (("#0072B2", "-"), ("#A35F00", "--"), ("#00664B", "-."), ("#A2487D", ":"), ("#1A1A1A", (0, (6, 1, 1, 1))))
_SIZE = 8


class _End(NamedTuple):
    """The end of a line, with its name."""

    value: float
    name: str
    color: str


class _Crossing(NamedTuple):
    """The batch at which a line falls below 1."""

    size: int
    name: str
    color: str


def speedup(scenarios: Mapping[str, Scenario], most: int = MOST_REQUESTS) -> Picture:
    """Draw the speed-up over plain decoding against running requests, a line per scenario, its crossover marked.

    InputError for no scenario, for more than five, and for one that does not draft.
    """
    if not 1 <= len(scenarios) <= len(LINES):
        raise InputError("scenarios", len(scenarios), f"1 to {len(LINES)}")
    for name, scenario in scenarios.items():
        if scenario.option.config.is_plain:
            raise InputError("scenarios", name, "scenarios that draft")
    figure = Picture(figsize=(7.2, 4.0), facecolor="white")
    FigureCanvasAgg(figure)
    longest = max(map(len, scenarios)) * _SIZE * EM / 7.2
    axes = figure.add_axes((0.09, 0.14, 0.85 - longest, 0.76))
    sizes = [size for size in range(1, most + 1) if size <= 16 or size % 8 == 0]
    ends = [
        _line(axes, name, scenario, sizes, look)
        for (name, scenario), look in zip(scenarios.items(), LINES, strict=False)
    ]
    _crossings(axes, scenarios, most)
    axes.axhline(1, color=FAINT, linewidth=0.8, zorder=1, gid="even")
    _label(axes, sizes, ends)
    return figure


def _line(axes: Axes, name: str, scenario: Scenario, sizes: list[int], look: tuple) -> _End:
    color, dash = look
    values = [scenario.speedup(size) for size in sizes]
    axes.plot(sizes, values, color=color, linestyle=dash, linewidth=1.8, gid=f"speedup:{name}")
    return _End(values[-1], name, color)


def _crossings(axes: Axes, scenarios: Mapping[str, Scenario], most: int) -> None:
    """Mark the batch where each line falls below 1, its number above and below the line by turns."""
    found = [
        _Crossing(size, name, color)
        for (name, scenario), (color, _) in zip(scenarios.items(), LINES, strict=False)
        if (size := scenario.crossover(most))
    ]
    for place, (size, name, color) in enumerate(sorted(found)):
        axes.plot([size], [1], "o", color=color, markersize=5, gid=f"crossover:{name}:{size}")
        beside = (3, -12) if place % 2 else (3, 5)
        axes.annotate(str(size), (size, 1), beside, textcoords="offset points", color=color, fontsize=_SIZE)


def _label(axes: Axes, sizes: list[int], ends: list[_End]) -> None:
    """Label the axes, and each line at its end, no name over another."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, sizes[-1])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    ticks = [2**power for power in range(0, sizes[-1].bit_length(), 2)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("running requests", family=FONT, fontsize=_SIZE, color=INK)
    axes.set_title("speed-up of decoding, simulated", family=FONT, fontsize=9.5, weight="bold", loc="left")
    axes.tick_params(labelsize=_SIZE, labelfontfamily=FONT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    low = -1.0
    least = axes.get_ylim()[1] * 0.05
    for value, name, color in sorted(ends):
        low = max(value, low + least)
        axes.annotate(name, (sizes[-1], low), (5, 0), textcoords="offset points", va="center", annotation_clip=False,
                      color=color, family=FONT, fontsize=_SIZE, parse_math=False)  # fmt: skip
