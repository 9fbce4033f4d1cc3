"""Bands about simulated figures: uncertainty of a profile's parameters, and of the model itself."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.parameters import Costs
from specsim.simulator.calibration.posterior import SIDE, Posterior, gradient, predict_logs


def half_widths(costs: Costs, observations: Sequence[Observation], posterior: Posterior) -> np.ndarray:
    """Compute the half-width of the band of every figure, on a logarithmic scale."""
    return half_width(partial(predict_logs, costs, observations, posterior.names, made={}), posterior)


def half_width(logs: Callable[[np.ndarray], np.ndarray], posterior: Posterior) -> np.ndarray:
    """Compute half-widths of logarithms that are a function of the parameters' logarithms (linear theory)."""
    slopes = gradient(logs, posterior.logs, high=posterior.logs)
    variance = np.einsum("fi,ij,fj->f", slopes, posterior.covariance, slopes)
    return SIDE * np.sqrt(variance + posterior.discrepancy**2)
