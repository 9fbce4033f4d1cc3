"""Acceptance of chains in the cells of a calibration, as measured or as fitted to their throughputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.core.errors import require_type
from specsim.simulator.acceptance_record import AcceptanceRecord, Interval
from specsim.simulator.bounds import number, probability
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.posterior import CONFIDENCE, SIDE, STEP, Posterior
from specsim.simulator.continuation import rates_of_lengths

TOOL = "specsim calibrate"


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """Acceptance of one drafter's chains on one target."""

    model: str
    drafter: str  # architecture
    rates: tuple[float, ...]  # share of rounds that accept at least 1, 2, ... drafts
    low: float  # ends of the 90 % interval of the accept length of as many steps
    high: float
    is_fitted: bool  # to throughputs; False: from accept lengths of the cells

    def __post_init__(self) -> None:
        for name in ("model", "drafter"):
            require_type(name, getattr(self, name), str, "a text")
        for rate in self.rates:
            probability("rates", rate)
        for name in ("low", "high"):
            number(name, getattr(self, name), 1)
        require_type("is_fitted", self.is_fitted, bool, "true or false")

    def record(self, profile: str) -> AcceptanceRecord:
        """Make the acceptance record of a profile of this name."""
        length = 1 + sum(self.rates)
        kind = "fitted to throughputs of chains" if self.is_fitted else "mean accept lengths of the cells"
        interval = Interval(self.low, self.high, CONFIDENCE, "the fit") if self.is_fitted else None
        return AcceptanceRecord(
            f"profile {profile}",
            TOOL,
            f"{kind}; accept lengths include the bonus token.",
            length,
            1,
            len(self.rates),
            rates=self.rates,
            interval=interval,
            pair=f"{self.model} with {self.drafter}",
        )

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write, and `of` can read."""
        figures = {name: float(f"{getattr(self, name):.4g}") for name in ("low", "high")}
        rates = [float(f"{rate:.4g}") for rate in self.rates]
        return {"model": self.model, "drafter": self.drafter, "rates": rates, **figures, "is_fitted": self.is_fitted}

    @classmethod
    def of(cls, value: Any) -> "ChainAcceptance | None":
        """Read a value that `to_json` made; None for none."""
        return None if value is None else cls(**value | {"rates": tuple(value["rates"])})


def chain_acceptance(
    model: str, drafter: str, cells: Sequence[Observation], posterior: Posterior
) -> ChainAcceptance | None:
    """Find the acceptance of the cells' chains; measured accept lengths count before fitted ones. None without chains.

    A number of steps in several cells has their mean accept length.
    """
    chains = [cell for cell in cells if not cell.config.is_plain and cell.config.topk == 1]
    lengths: dict[int, list[float]] = {}
    for cell in chains:
        if cell.accept_length is not None:
            lengths.setdefault(cell.config.num_steps, []).append(cell.accept_length)
    if lengths:
        rates = rates_of_lengths({steps: float(np.mean(each)) for steps, each in lengths.items()})
        length = 1 + sum(rates)
        return ChainAcceptance(model, drafter, rates, length, length, is_fitted=False)
    if not chains:
        return None
    steps = max(cell.config.num_steps for cell in chains)
    places = [posterior.names.index(name) for name in ("accept_rate", "accept_decay")]
    logs = posterior.logs[places]
    slopes = [(np.log(_length(logs + move, steps) / _length(logs - move, steps))) / (2 * STEP) for move in _MOVES]
    variance = np.array(slopes) @ posterior.covariance[np.ix_(places, places)] @ np.array(slopes)
    half = float(SIDE * np.sqrt(variance))
    length = _length(logs, steps)
    low, high = max(1.0, length * np.exp(-half)), min(steps + 1.0, length * np.exp(half))
    return ChainAcceptance(model, drafter, _rates(logs, steps), float(low), float(high), is_fitted=True)


_MOVES = np.diag([STEP, STEP])


def _rates(logs: np.ndarray, steps: int) -> tuple[float, ...]:
    rate, decay = np.exp(logs)
    return tuple(np.minimum(np.cumprod(rate * decay ** np.arange(steps)), 1.0).tolist())


def _length(logs: np.ndarray, steps: int) -> float:
    return 1 + sum(_rates(logs, steps))
