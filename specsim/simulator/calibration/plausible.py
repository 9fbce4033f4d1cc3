"""Doubts about a calibration: parameters that no server of such a GPU has, and cells that no server explains."""

from collections.abc import Mapping

import numpy as np

from specsim.simulator.calibration.parameters import PRIORS
from specsim.simulator.calibration.posterior import Posterior

FAR = 2.5  # spreads of the prior beyond which a value is doubtful
LARGE = 0.10  # relative error of a fitted cell
_SHARES = {
    "compute": "of a GPU's arithmetic: probably another GPU or setting",
    "bandwidth": "of a GPU's bandwidth: probably another GPU, model or weight format",
}


def doubts(posterior: Posterior, errors: np.ndarray, left_out: Mapping[int, np.ndarray]) -> list[str]:
    """List doubts in sentences; errors: of the fitted figures, relative."""
    found = []
    for name, log in zip(posterior.names, posterior.logs, strict=True):
        prior = PRIORS[name]
        is_far = _is_far(name, log)
        value = f"{np.exp(log):.0%}" if name in _SHARES else f"{np.exp(log):.3g} {prior.unit}"
        if name in posterior.at_bounds:
            found.append(f"{name} is at a bound of the fit, {value}{_why(name)}.")
        elif is_far and name in _SHARES:
            found.append(f"The fit takes {value} {_SHARES[name]}.")
        elif is_far:
            found.append(f"{name} is {value}, far from servers known so far ({prior.value:.3g}): check the settings.")
    worst = float(np.abs(errors).max())
    if worst > LARGE:
        found.append(
            f"A fitted cell is {worst:.0%} off: no server explains all cells. Batches may not be full, or settings, "
            "lengths or accept lengths may not be those of the runs."
        )
    outside = max((float(np.abs(each).max()) for each in left_out.values()), default=0.0)
    if outside > 3 * LARGE:
        found.append(f"A batch that is left out is {outside:.0%} off: do not extrapolate far beyond the measured ones.")
    return found


def is_of_another_gpu(posterior: Posterior) -> bool:
    """Whether a share of the GPU's peaks is one that no server is known to reach, or to stay below."""
    pairs = zip(posterior.names, posterior.logs, strict=True)
    return any(name in _SHARES and _is_far(name, log) for name, log in pairs)


def _is_far(name: str, log: float) -> bool:
    return bool(abs(log - np.log(PRIORS[name].value)) > FAR * PRIORS[name].spread)


def _why(name: str) -> str:
    return f" {_SHARES[name]}" if name in _SHARES else ""
