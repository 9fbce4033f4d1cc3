"""Shares of a GPU's peaks from one kind of models, for another kind whose tables do not determine them.

Of experts a table determines the product of a share and of the speed of experts alone. Dense models of the same engine
on the same GPU determine the share, which is of the same kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specsim.simulator.calibration.another_gpu import SHARES
from specsim.simulator.calibration.parameters import PRIORS, Prior
from specsim.simulator.calibration.posterior import Posterior
from specsim.simulator.calibration.published import Measured
from specsim.simulator.calibration.structure import Calibrated, calibrate


def together_with_shares(found: Sequence[Measured], every: Sequence[Measured]) -> Calibrated:
    """Fit an engine's tables together, with shares of peaks from those of `every` that it names."""
    return together(found, shared_priors(tables_of_shares(found, every)))


def tables_of_shares(found: Sequence[Measured], every: Sequence[Measured]) -> tuple[Measured, ...]:
    """Find the tables of `every` from which an engine's tables take shares of peaks."""
    return tuple(each for each in every if each.engine == found[0].shares_of)


def shared_priors(given: Sequence[Measured]) -> Mapping[str, Prior]:
    """Fit tables together, and take their shares of peaks as priors; PRIORS without tables."""
    return with_shares(together(given, PRIORS).posterior) if given else PRIORS


def with_shares(posterior: Posterior) -> dict[str, Prior]:
    """Take shares as another fit has found them, with their uncertainty there, as priors."""
    values, deviations = posterior.values, posterior.deviations
    own = {name: replace(PRIORS[name], value=values[name], spread=deviations[name]) for name in SHARES}
    return {**PRIORS, **own}


def together(tables: Sequence[Measured], priors: Mapping[str, Prior]) -> Calibrated:
    """Fit tables together, all with the structures of the first."""
    costs = {source: cost for each in tables for source, cost in each.costs.items()}
    cells = [cell for each in tables for cell in each.cells]
    return calibrate(costs, cells, tables[0].structures, priors)
