"""Choice of the structure of a server for measured figures, and doubts about the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specsim.simulator.calibration.observation import PRIORS, Costs, Observation, Prior
from specsim.simulator.calibration.posterior import Posterior, fit, measured, noises, predict
from specsim.simulator.calibration.profile import ServerStructure
from specsim.simulator.cost import CostModel

MARGIN = 20.0
STRUCTURES = (
    ServerStructure(),
    ServerStructure("sync"),
    ServerStructure("sync", plain_schedule="overlap"),  # engines that do not overlap speculation
    ServerStructure("sync", "target"),
    ServerStructure("sync", "target", "overlap"),
    ServerStructure("sync", "none"),
)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The posterior of the structure that explains the figures best."""

    costs: Mapping[str, CostModel]  # with the structure
    structure: ServerStructure
    posterior: Posterior
    tried: Mapping[ServerStructure, float]  # structures with the objective of their fits; lower is better

    def predict(self, observations: Sequence[Observation]) -> np.ndarray:
        """Compute all figures of all observations, in order."""
        return predict(self.costs, observations, self.posterior.values)


def calibrate(
    costs: Costs,
    observations: Sequence[Observation],
    structures: Sequence[ServerStructure] = STRUCTURES,
    priors: Mapping[str, Prior] = PRIORS,
) -> Calibrated:
    """Fit every structure; take the first one for which figures are at most MARGIN times as likely under another."""
    fits = []
    for structure in structures:
        models = structure.costs(costs)
        posterior = fit(models, observations, priors=priors)
        fits.append((objective(models, observations, posterior, priors), structure, models, posterior))
    least = min(candidate[0] for candidate in fits)
    _, structure, models, posterior = next(candidate for candidate in fits if candidate[0] <= least + np.log(MARGIN))
    return Calibrated(models, structure, posterior, {candidate[1]: candidate[0] for candidate in fits})


def objective(
    costs: Costs, observations: Sequence[Observation], posterior: Posterior, priors: Mapping[str, Prior] = PRIORS
) -> float:
    """Compute half the sum of squares that a fit minimises: residuals over noises, and distances from the priors."""
    residuals = np.log(predict(costs, observations, posterior.values) / measured(observations)) / noises(observations)
    used = [priors[name] for name in posterior.names]
    distances = (posterior.logs - np.log([prior.value for prior in used])) / np.array([prior.spread for prior in used])
    return float(residuals @ residuals + distances @ distances) / 2


def left_out(costs: Costs, observations: Sequence[Observation]) -> dict[int, np.ndarray]:
    """Compute the errors of every batch size under a fit to the others; none if only one."""
    sizes = sorted({observation.batch for observation in observations})
    errors = {}
    for size in sizes if len(sizes) > 1 else ():
        seen = [observation for observation in observations if observation.batch != size]
        rest = [observation for observation in observations if observation.batch == size]
        predicted = predict(costs, rest, fit(costs, seen).values)
        errors[size] = predicted / measured(rest) - 1
    return errors


FAR = 2.5  # spreads of the prior beyond which a value is doubtful
LARGE = 0.10  # relative error of a fitted cell
_SHARES = {
    "compute": "of a GPU's arithmetic: probably another GPU or setting",
    "bandwidth": "of a GPU's bandwidth: probably another GPU, model or weight format",
}


def doubts(posterior: Posterior, errors: np.ndarray, left_out: Mapping[int, np.ndarray]) -> list[str]:
    """List doubts in sentences; errors: of the fitted figures, relative."""
    sentences = []
    for name, log in zip(posterior.names, posterior.logs, strict=True):
        prior = PRIORS[name]
        is_far = _is_far(name, log)
        value = f"{np.exp(log):.0%}" if name in _SHARES else f"{np.exp(log):.3g} {prior.unit}"
        if name in posterior.at_bounds:
            sentences.append(f"{name} is at a bound of the fit, {value}{_why(name)}.")
        elif is_far and name in _SHARES:
            sentences.append(f"The fit takes {value} {_SHARES[name]}.")
        elif is_far:
            sentences.append(
                f"{name} is {value}, far from servers known so far ({prior.value:.3g}): check the settings."
            )
    worst = float(np.abs(errors).max())
    if worst > LARGE:
        sentences.append(
            f"A fitted cell is {worst:.0%} off: no server explains all cells. Batches may not be full, or settings, "
            "lengths or accept lengths may not be those of the runs."
        )
    outside = max((float(np.abs(batch_errors).max()) for batch_errors in left_out.values()), default=0.0)
    if outside > 3 * LARGE:
        sentences.append(
            f"A batch that is left out is {outside:.0%} off: do not extrapolate far beyond the measured ones."
        )
    return sentences


def is_of_another_gpu(posterior: Posterior) -> bool:
    """Whether a share of the GPU's peaks is one that no server is known to reach, or to stay below."""
    pairs = zip(posterior.names, posterior.logs, strict=True)
    return any(name in _SHARES and _is_far(name, log) for name, log in pairs)


def _is_far(name: str, log: float) -> bool:
    return bool(abs(log - np.log(PRIORS[name].value)) > FAR * PRIORS[name].spread)


def _why(name: str) -> str:
    return f" {_SHARES[name]}" if name in _SHARES else ""
