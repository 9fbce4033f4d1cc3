"""Bands about simulated figures: uncertainty of a profile's parameters, and of the model itself."""

from collections.abc import Callable, Sequence

import numpy as np

from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.parameters import Costs
from specsim.simulator.calibration.posterior import SIDE, STEP, Posterior, predict


def half_widths(costs: Costs, observations: Sequence[Observation], posterior: Posterior) -> np.ndarray:
    """Compute the half-width of the band of every figure, on a logarithmic scale."""

    def logs(place: np.ndarray) -> np.ndarray:
        return np.log(predict(costs, observations, dict(zip(posterior.names, np.exp(place), strict=True))))

    return half_width(logs, posterior)


def half_width(logs: Callable[[np.ndarray], np.ndarray], posterior: Posterior) -> np.ndarray:
    """Compute half-widths of logarithms that are a function of the parameters' logarithms (linear theory)."""
    slopes = gradient(logs, posterior)
    variance = np.einsum("fi,ij,fj->f", slopes, posterior.covariance, slopes)
    return SIDE * np.sqrt(variance + posterior.discrepancy**2)


def gradient(logs: Callable[[np.ndarray], np.ndarray], posterior: Posterior) -> np.ndarray:
    """Compute derivatives of logarithms by the parameters' logarithms, [F, P]."""
    steps = np.diag(np.full(len(posterior.logs), STEP))
    sides = [np.atleast_1d(logs(posterior.logs - step)) for step in steps]
    here = np.atleast_1d(logs(posterior.logs))
    return np.stack([(here - side) / STEP for side in sides], axis=1)
