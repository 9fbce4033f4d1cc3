"""How far rounds get: shares of them by position."""

from collections.abc import Mapping

from specsim.core.errors import InputError
from specsim.plots.chart import SIZE, new_chart, write_beside
from specsim.plots.sheet import EM, Picture
from specsim.plots.speedup import LINES
from specsim.simulator.acceptance import Law, accept_length


def positions(laws: Mapping[str, Law]) -> Picture:
    """Share of the rounds that accept at least 1, 2, ... drafts (unconditional), a line a law, with its accept length.

    InputError for no law, or for more than five.
    """
    if not 1 <= len(laws) <= len(LINES):
        raise InputError("laws", len(laws), f"1 to {len(LINES)}")
    names = {name: f"{name}: {accept_length(law):.2f}" for name, law in laws.items()}
    longest = max(map(len, names.values())) * SIZE * EM / 7.2
    title = "accepted by position, and tokens a round"
    figure, axes = new_chart(title, "draft", "share of the rounds", right=longest)
    most, ends = max(law.num_steps for law in laws.values()), []
    for (name, law), (color, dash) in zip(laws.items(), LINES, strict=False):
        rates = [1.0, *law.rates().tolist()]
        axes.plot(range(len(rates)), rates, color=color, linestyle=dash, marker="o", markersize=3.5, gid=f"law:{name}")
        ends.append((rates[-1], len(rates) - 1, names[name], color))
    low = -0.03  # the axis is no place for a name
    for rate, place, text, color in sorted(ends):
        low = max(rate, low + 0.06)
        write_beside(axes, place, low, text, color, (7, 0))
    axes.set_xticks(range(most + 1))
    axes.set_xlim(0, most)
    axes.set_ylim(0, 1.02)
    return figure
