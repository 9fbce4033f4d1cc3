"""Choice of the loads to measure: those that leave the least uncertainty of all predictions."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations

import numpy as np

from specsim.core.errors import require
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.parameters import PRIORS, Costs
from specsim.simulator.calibration.posterior import NOISE, gradient, noises, predict_logs

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

    values, most = (np.log([getattr(PRIORS[name], bound) for name in names]) for bound in ("value", "most"))
    by_figure = gradient(partial(predict_logs, costs, observations, names, made={}), values, most)
    ends = np.cumsum([len(each.figures) for each in observations])
    noise = noises(observations)
    scaled = np.split(by_figure / noise[:, None], ends[:-1])
    information = np.stack([own.T @ own for own in scaled])  # [O, P, P]
    before = np.diag([PRIORS[name].spread ** -2 for name in names])
    compared = by_figure[noise == NOISE]

    def largest_variance(chosen: tuple[int, ...]) -> float:
        covariance = np.linalg.inv(before + information[list(chosen)].sum(0))
        return float(np.einsum("fp,pq,fq->f", compared, covariance, compared).max())

    best = min(combinations(range(len(observations)), count), key=largest_variance)
    return tuple(observations[place] for place in best)
