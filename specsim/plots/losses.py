"""Losses of trainings, step by step."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from specsim.core.arguments import check_arguments
from specsim.core.errors import require
from specsim.plots.sheet import LINES, End, Picture, label_ends, new_chart

_STEPS_A_MEAN = 10  # steps that the moving mean covers


@check_arguments
def losses(runs: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the loss of every training step faintly, and its moving mean over 10 steps in bold.

    runs: losses in nats by a name. InputError for no run, for more than five, or for one with a loss that is not a
    finite number.
    """
    require(1 <= len(runs) <= len(LINES), "runs", len(runs), f"1 to {len(LINES)} runs")
    for name, row in runs.items():
        require(len(row) > 0, name, len(row), "at least one loss")
        require(all(map(math.isfinite, row)), name, "a loss that is not finite", "finite numbers")
    means = {name: _moving_mean(row) for name, row in runs.items()}
    figure, axes = new_chart("loss by training step", "training step", "loss (nats)", height=3.4, names=runs)
    ends = []
    for (name, row), (color, dash) in zip(runs.items(), LINES, strict=False):
        steps = range(1, len(row) + 1)
        axes.plot(steps, row, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, means[name], color=color, linestyle=dash, linewidth=1.8, gid=f"loss:{name}")
        ends.append(End(means[name][-1], len(row), name, color))
    axes.set_xlim(0, max(map(len, runs.values())))
    axes.set_ylim(0, 1.04 * max(map(max, runs.values())))
    label_ends(axes, ends)
    figure.description = "Loss by training step, mean over 10 steps. " + " ".join(
        f"{name}: {row[min(_STEPS_A_MEAN, len(row)) - 1]:.3g} at first, {row[-1]:.3g} after {len(row)} steps."
        for name, row in means.items()
    )
    return figure


def _moving_mean(row: Sequence[float]) -> list[float]:
    """Average every step with those before it, at most 10 in all."""
    sums = [0.0, *accumulate(row)]
    ends = range(1, len(sums))
    return [(sums[end] - sums[max(0, end - _STEPS_A_MEAN)]) / min(end, _STEPS_A_MEAN) for end in ends]
