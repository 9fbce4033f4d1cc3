"""Speed-up of speculation over batch size, and the batch where it falls below 1."""

from collections.abc import Mapping
from textwrap import fill

from specsim.core.errors import require, require_type
from specsim.plots.chart import LINES, SIZE, WIDTH, End, label_ends, new_chart
from specsim.plots.sheet import EM, FAINT, FONT, INK, Axes, Picture
from specsim.simulator.scenario import LARGEST_BATCH, Scenario, calibration, speedup_range


def speedup(scenarios: Mapping[str, Scenario], most: int = LARGEST_BATCH) -> Picture:
    """Draw the speed-up over plain decoding against running requests, a line per scenario, its crossover marked.

    A band around each line is its range under the parameters that fits to published tables found.
    InputError for no scenario, for more than five, and for one that does not draft.
    """
    require_type("scenarios", scenarios, Mapping, "Scenarios by their names")
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
        values = [each.value for each in ranges]
        axes.plot(sizes, values, color=color, linestyle=dash, linewidth=1.8, gid=f"speedup:{name}")
        edges = ([each.lowest for each in ranges], [each.highest for each in ranges])
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
    width = int(0.95 * axes.get_position().width * WIDTH / (SIZE * EM))  # characters of a line
    axes.text(0.01, 0.02, fill(text, width), transform=axes.transAxes, va="bottom",
              color=INK, family=FONT, fontsize=SIZE, parse_math=False)  # fmt: skip


def _mark(axes: Axes, crossings: list[End]) -> None:
    """Mark the batch where each line falls below 1, its number above and below the line by turns."""
    for place, (_, size, name, color) in enumerate(sorted(crossings)):
        axes.plot([size], [1], "o", color=color, markersize=5, gid=f"crossover:{name}:{size}")
        offset = (3, -12) if place % 2 else (3, 5)
        axes.annotate(str(size), (size, 1), offset, textcoords="offset points", color=color, fontsize=SIZE)
