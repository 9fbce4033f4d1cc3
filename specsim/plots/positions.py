"""Acceptance by position: of distributions that the simulator assumes, and of rounds that were run."""

from collections.abc import Mapping

from specsim.core.errors import require, require_type
from specsim.core.metrics import Acceptance
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
    return _lines({name: (accept_length(each), each.rates().tolist()) for name, each in distributions.items()})


def acceptance(results: Mapping[str, Acceptance]) -> Picture:
    """Draw the share of rounds that accepted at least 1, 2, ... drafts, a line per result with its accept length.

    results: Generation.acceptance by a name. InputError for no result, more than five, or one without a round.
    """
    require_type("results", results, Mapping, "values of Generation.acceptance by their names")
    for name, each in results.items():
        require_type(name, each, Acceptance, "a Generation's acceptance")
        require(each.rounds, name, each.rounds, "a result of at least one round")
    require(1 <= len(results) <= len(LINES), "results", len(results), f"1 to {len(LINES)}")
    return _lines({name: (each.accept_length, list(each.accepted_by_position)) for name, each in results.items()})


def _lines(results: Mapping[str, tuple[float, list[float]]]) -> Picture:
    """Draw a line per name, through its share of rounds at each position; the value begins with the accept length."""
    names = {name: f"{name}: {length:.2f}" for name, (length, _) in results.items()}
    title = "accepted by position, and tokens a round"
    figure, axes = new_chart(title, "draft", "share of the rounds", names=names.values())
    most = max(1, *(len(rates) for _, rates in results.values()))
    ends = []
    for (name, (_, shares)), (color, dash) in zip(results.items(), LINES, strict=False):
        rates = [1.0, *shares]
        look = {"color": color, "linestyle": dash, "marker": "o", "markersize": 3.5}
        axes.plot(range(len(rates)), rates, gid=f"distribution:{name}", **look)
        ends.append(End(rates[-1], len(rates) - 1, names[name], color))
    axes.set_xticks(range(most + 1))
    axes.set_xlim(0, most)
    axes.set_ylim(0, 1.02)
    label_ends(axes, ends)
    return figure
