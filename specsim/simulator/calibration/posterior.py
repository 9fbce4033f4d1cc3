"""Fit of all parameters at once, each held near its prior as far as the measurements do not say otherwise.

Measured figures have independent relative errors. So the fit minimises, on logarithms, the squares of residuals over
NOISES plus the squares of the distances from the priors over their spreads. A parameter that the figures do not
determine stays at its prior instead of taking any value.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np

from specsim.core.errors import require
from specsim.simulator.calibration.observation import (
    PRIORS,
    Costs,
    Observation,
    Parameters,
    Prior,
    candidates,
    plain_name,
)
from specsim.simulator.cost import CostModel

NOISE = 0.03  # relative error of a figure: between two runs of a cell of vllm_41162 it is 1 % on average
NOISES = {"ttft_s": 0.2}  # waiting for a first token varies more
CONFIDENCE = 0.90
SIDE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
DETERMINED = 0.5  # most of a prior's spread that is left of a parameter that the figures determine
_EDGE = 0.02  # distance from a bound, on a logarithmic scale, that counts as on it
# Distances of starts from the priors: maxima in a cost make local optima.
STARTS: tuple[Mapping[str, float], ...] = ({}, {"compute": -0.7, "overlap": 0.4, "gap": 0.4})
STEP = 0.02  # of derivatives, on a logarithmic scale
_UNUSED = (
    "intake",
    "latency",
    "accept_rate",
    "accept_decay",
)  # of servers and drafts that measurements did not include
_FARTHEST = 6.0  # spreads from the prior to the bounds of the fit


@dataclass(frozen=True, eq=False)
class Posterior:
    """Parameters after a fit: logarithms, normal about the optimum."""

    names: tuple[str, ...]
    logs: np.ndarray  # [P]
    covariance: np.ndarray  # [P, P]
    discrepancy: float  # relative error of a prediction besides that of the parameters

    @property
    def values(self) -> dict[str, float]:
        return dict(zip(self.names, np.exp(self.logs).tolist(), strict=True))

    @property
    def deviations(self) -> dict[str, float]:
        """Standard deviations of the logarithms."""
        return dict(zip(self.names, np.sqrt(self.covariance.diagonal()).tolist(), strict=True))

    def with_priors(self) -> "Posterior":
        """Add the parameters that the figures did not depend on, as uncertain as their priors."""
        missing = tuple(name for name in PRIORS if name not in (*self.names, *_UNUSED))
        logs = np.log([PRIORS[name].value for name in missing])
        added = np.diag([PRIORS[name].spread ** 2 for name in missing])
        fitted = self.covariance
        between = np.zeros((len(fitted), len(added)))
        covariance = np.block([[fitted, between], [between.T, added]])
        return Posterior((*self.names, *missing), np.concatenate([self.logs, logs]), covariance, self.discrepancy)

    @property
    def determined(self) -> tuple[str, ...]:
        """Parameters whose uncertainty the figures at least halve, and that are not at a bound of the fit."""
        deviations = self.deviations
        return tuple(
            name
            for name in self.names
            if deviations[name] <= DETERMINED * PRIORS[name].spread and name not in self.at_bounds
        )

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """Parameters that the fit would move beyond their bounds."""
        bounds = {name: np.log((PRIORS[name].least, PRIORS[name].most)) for name in self.names}
        logs = zip(self.names, self.logs, strict=True)
        return tuple(
            name for name, log in logs if np.abs(bounds[name] - log).min() < _EDGE and not _is_usual(name, log)
        )

    def interval(self, name: str) -> tuple[float, float]:
        """Compute the CONFIDENCE interval of a parameter, within its bounds."""
        half = SIDE * self.deviations[name]
        log = self.logs[self.names.index(name)]
        prior = PRIORS[name]
        return max(prior.least, float(np.exp(log - half))), min(prior.most, float(np.exp(log + half)))


def _is_usual(name: str, log: float) -> bool:
    """Whether the bound is one that a good server reaches: all of the overlap, experts as quick as other products."""
    return log > -_EDGE and name in ("overlap", "experts", "mxfp4_experts", "accept_decay")


CostModels = dict[tuple[Hashable, ...], CostModel]  # cost models with what they have computed, by server and parameters


def predict(
    costs: Costs, observations: Sequence[Observation], values: Mapping[str, float], models: CostModels | None = None
) -> np.ndarray:
    """Compute all figures of all observations, in order, with these parameters.

    models: cost models of earlier calls with the same costs, which are used again where their parameters are equal.
    """
    parameters = Parameters.of(values)
    models = {} if models is None else models
    figures: list[float] = []
    for observation in observations:
        key = (
            observation.source,
            observation.filters,
            observation.config.is_plain,
            parameters.efficiency,
            parameters.skew,
        )
        if key not in models:
            plain_cost = costs.get(plain_name(observation.source)) if observation.config.is_plain else None
            cost = parameters.cost(plain_cost or costs[observation.source], observation.filters)
            models[key] = replace(cost, drafter=None) if observation.config.is_plain else cost
        figures += observation.predict(models[key], parameters.front, parameters.acceptance).values()
    return np.array(figures)


def measured(observations: Sequence[Observation]) -> np.ndarray:
    """List all measured figures, in the order of `predict`."""
    return np.array([value for observation in observations for value in observation.figures.values()])


def noises(observations: Sequence[Observation]) -> np.ndarray:
    """List the assumed relative errors of the figures."""
    return np.array([NOISES.get(name, NOISE) for observation in observations for name in observation.figures])


def predict_logs(
    costs: Costs,
    observations: Sequence[Observation],
    names: Sequence[str],
    logs: np.ndarray,
    models: CostModels | None = None,
) -> np.ndarray:
    """Compute the logarithms of all figures from those of the parameters of these names; models: see `predict`."""
    return np.log(predict(costs, observations, dict(zip(names, np.exp(logs), strict=True)), models))


def gradient(function: Callable[[np.ndarray], np.ndarray], point: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Differentiate a function of logarithms of parameters, [F, P].

    Differences have steps that cross the kinks of a maximum, and go down where they would pass the bound `high`.
    """
    here = np.atleast_1d(function(point))
    steps = np.where(point + STEP <= high, STEP, -STEP)
    return np.stack([(np.atleast_1d(function(point + step)) - here) / step.sum() for step in np.diag(steps)], axis=1)


def fit(
    costs: Costs,
    observations: Sequence[Observation],
    names: Sequence[str] | None = None,
    priors: Mapping[str, Prior] = PRIORS,
) -> Posterior:
    """Fit the parameters of these names, or all that the observations can depend on."""
    require(observations, "observations", 0, "at least one measured cell")
    names = candidates(costs, observations) if names is None else tuple(names)
    logs = np.log(measured(observations))
    noise = noises(observations)
    prior = np.log([priors[name].value for name in names])
    spread = np.array([priors[name].spread for name in names])
    low = np.maximum(np.log([PRIORS[name].least for name in names]), prior - _FARTHEST * spread)
    high = np.minimum(np.log([PRIORS[name].most for name in names]), prior + _FARTHEST * spread)

    def residuals(point: np.ndarray, models: CostModels | None = None) -> np.ndarray:
        predicted = predict_logs(costs, observations, names, point, models)
        return np.concatenate([(predicted - logs) / noise, (point - prior) / spread])

    from scipy.optimize import least_squares  # slow to load

    jac: Any = lambda point: gradient(partial(residuals, models={}), point, high)  # noqa: E731 - scipy's stubs lack its type
    inside = [np.clip(prior + _offsets(names, start), low + 1e-3, high - 1e-3) for start in STARTS]
    tried = [least_squares(residuals, start, jac, (low, high), ftol=1e-5, xtol=1e-5) for start in inside]
    best = min(tried, key=lambda result: result.cost)
    precision = best.jac.T @ best.jac
    covariance = np.linalg.inv(precision)
    return Posterior(names, best.x, covariance, _discrepancy(best.jac, best.fun, covariance, noise))


def _discrepancy(jacobian: np.ndarray, residuals: np.ndarray, covariance: np.ndarray, noise: np.ndarray) -> float:
    """Estimate the error of a prediction from the error of each figure when the others are fitted (linear theory).

    Figures with a noise of their own, such as TTFT, are left out; it is at least NOISE.
    """
    count = len(noise)
    leverage = np.einsum("ij,jk,ik->i", jacobian[:count], covariance, jacobian[:count])
    left_out = residuals[:count] / np.maximum(1 - leverage, 0.1)
    used = left_out[noise == NOISE]
    return float(NOISE * max(1.0, np.sqrt(np.mean(used**2)))) if len(used) else NOISE


def _offsets(names: Sequence[str], start: Mapping[str, float]) -> np.ndarray:
    return np.array([start.get(name, 0.0) for name in names])


KEPT = 0.5  # of a parameter's distance from its prior
SHARES = ("bandwidth", "compute", "overlap")  # of the GPU's peaks
HOST = ("launch", "host", "host_request", "host_drafts", "draft_step")  # seconds of the machine's CPU
MOVED = (*SHARES, *HOST)


def on_another_gpu(posterior: Posterior) -> Posterior:
    """Move parameters: shares of peaks and times of the host are half the engine's, and half the machine's.

    So each of them keeps half of its distance from its prior, and half of the prior's variance is added.
    """
    priors = np.log([PRIORS[name].value for name in posterior.names])
    spreads = np.array([PRIORS[name].spread for name in posterior.names])
    factors = np.where([name in MOVED for name in posterior.names], KEPT, 1.0)
    logs = priors + factors * (posterior.logs - priors)
    covariance = posterior.covariance * np.outer(factors, factors) + np.diag((1 - factors) * spreads**2)
    return replace(posterior, logs=logs, covariance=covariance)


def half_widths(costs: Costs, observations: Sequence[Observation], posterior: Posterior) -> np.ndarray:
    """Compute the half-width of the band of every figure, on a logarithmic scale."""
    return half_width(partial(predict_logs, costs, observations, posterior.names, models={}), posterior)


def half_width(logs: Callable[[np.ndarray], np.ndarray], posterior: Posterior) -> np.ndarray:
    """Compute half-widths of logarithms that are a function of the parameters' logarithms (linear theory)."""
    slopes = gradient(logs, posterior.logs, high=posterior.logs)
    variance = np.einsum("fi,ij,fj->f", slopes, posterior.covariance, slopes)
    return SIDE * np.sqrt(variance + posterior.discrepancy**2)


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
    by_figure = gradient(partial(predict_logs, costs, observations, names, models={}), values, most)
    ends = np.cumsum([len(observation.figures) for observation in observations])
    noise = noises(observations)
    scaled = np.split(by_figure / noise[:, None], ends[:-1])
    information = np.stack([rows.T @ rows for rows in scaled])  # [O, P, P]
    before = np.diag([PRIORS[name].spread ** -2 for name in names])
    compared = by_figure[noise == NOISE]

    def largest_variance(chosen: tuple[int, ...]) -> float:
        covariance = np.linalg.inv(before + information[list(chosen)].sum(0))
        return float(np.einsum("fp,pq,fq->f", compared, covariance, compared).max())

    best = min(combinations(range(len(observations)), count), key=largest_variance)
    return tuple(observations[index] for index in best)
