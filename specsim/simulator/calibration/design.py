"""Choice of the loads to measure: those that leave the least uncertainty of all predictions."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from specsim.core.errors import require
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.parameters import PRIORS, Costs
from specsim.simulator.calibration.posterior import NOISES, STEP, noises, predict

_MOST_CHOICES = 100_000


def most_informative(
    costs: Costs, observations: Sequence[Observation], count: int, names: Sequence[str]
) -> tuple[Observation, ...]:
    """Choose `count` observations to which parameters of these names should be fitted, without reading their figures.

    A choice is as good as the largest uncertainty that it leaves of any figure of any observation: a G-optimal design
    (Kiefer & Wolfowitz 1960), by linear theory about the priors. Figures with a noise of their own, such as TTFT, are
    left out of the comparison. All choices are tried, 100,000 at most, or InputError.
    """
    require(1 <= count <= len(observations), "count", count, f"1 to {len(observations)}, the number of observations")
    choices = math.comb(len(observations), count)
    require(choices <= _MOST_CHOICES, "count", count, f"at most {_MOST_CHOICES:,} choices; these are {choices:,}")
    slopes = _slopes(costs, observations, names)
    ends = np.cumsum([len(each.figures) for each in observations])
    scaled = np.split(slopes / noises(observations)[:, None], ends[:-1])
    information = np.stack([own.T @ own for own in scaled])  # [O, P, P]
    before = np.diag([PRIORS[name].spread ** -2 for name in names])
    compared = slopes[[name not in NOISES for each in observations for name in each.figures]]

    def largest_variance(chosen: tuple[int, ...]) -> float:
        covariance = np.linalg.inv(before + information[list(chosen)].sum(0))
        return float(np.einsum("fp,pq,fq->f", compared, covariance, compared).max())

    best = min(combinations(range(len(observations)), count), key=largest_variance)
    return tuple(observations[place] for place in best)


def _slopes(costs: Costs, observations: Sequence[Observation], names: Sequence[str]) -> np.ndarray:
    """Differentiate the logarithms of all figures by those of the parameters, at the priors, [F, P]."""
    values = {name: PRIORS[name].value for name in names}
    here = np.log(predict(costs, observations, values))
    columns = []
    for name, value in values.items():
        step = STEP if value * math.exp(STEP) <= PRIORS[name].most else -STEP
        moved = predict(costs, observations, values | {name: value * math.exp(step)})
        columns.append((np.log(moved) - here) / step)
    return np.stack(columns, axis=1)
