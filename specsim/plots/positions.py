"""Acceptance by position."""

from collections.abc import Mapping

from specsim.core.errors import require, require_type
from specsim.plots.chart import LINES, End, label_ends, new_chart
from specsim.plots.sheet import Picture
from specsim.simulator.acceptance import Distribution, accept_length


def positions(distributions: Mapping[str, Distribution]) -> Picture:
    """Draw the share of rounds that accept at least 1, 2, ... drafts, a line per distribution.

    Its name stands with its accept length. InputError for no distribution, or for more than five.
    """
    require_type("distributions", distributions, Mapping, "distributions of acceptance by their names")
    for name, each in distributions.items():
        require(hasattr(each, "rates"), "distributions", name, "names of distributions of specsim.simulator.acceptance")
    require(1 <= len(distributions) <= len(LINES), "distributions", len(distributions), f"1 to {len(LINES)}")
    names = {name: f"{name}: {accept_length(each):.2f}" for name, each in distributions.items()}
    title = "accepted by position, and tokens a round"
    figure, axes = new_chart(title, "draft", "share of the rounds", names=names.values())
    most = max(each.num_steps for each in distributions.values())
    ends = []
    for (name, each), (color, dash) in zip(distributions.items(), LINES, strict=False):
        rates = [1.0, *each.rates().tolist()]
        look = {"color": color, "linestyle": dash, "marker": "o", "markersize": 3.5}
        axes.plot(range(len(rates)), rates, gid=f"distribution:{name}", **look)
        ends.append(End(rates[-1], len(rates) - 1, names[name], color))
    axes.set_xticks(range(most + 1))
    axes.set_xlim(0, most)
    axes.set_ylim(0, 1.02)
    label_ends(axes, ends)
    return figure
