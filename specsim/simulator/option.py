"""Parts of a simulated server: a cost, and settings with their acceptance, from which a policy chooses."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.simulator.acceptance import Acceptance, Distribution, PerPosition


class Cost(Protocol):
    """Seconds of forwards; see specsim.simulator.cost.CostModel."""

    def prefill(self, new_tokens: np.ndarray, contexts: np.ndarray) -> float: ...

    def round(self, contexts: np.ndarray, config: SpecConfig) -> float: ...

    def mixed(self, new_tokens: np.ndarray, behind: np.ndarray, contexts: np.ndarray, config: SpecConfig) -> float: ...


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of speculation and the acceptance of its drafts."""

    config: SpecConfig
    acceptance: Acceptance

    def __post_init__(self) -> None:
        allowed = f"acceptance of at least num_steps drafts, {self.config.num_steps}"
        require(self.acceptance.num_steps >= self.config.num_steps, "acceptance", self.acceptance.num_steps, allowed)

    @property
    def rates(self) -> np.ndarray:
        """Share of rounds that accept at least 1, 2, ... drafts; InputError without a closed form."""
        if not isinstance(self.acceptance, Distribution):
            raise InputError("acceptance", self.acceptance, "a distribution with a closed form")
        return self.acceptance.rates(self.config.num_steps)

    @property
    def accept_length(self) -> float:
        """Mean tokens of a round, bonus included; InputError as for rates."""
        return 1.0 + float(np.sum(self.rates))

    @classmethod
    def plain(cls, page_size: int = 16) -> "Option":
        """Make the option without drafts."""
        return cls(SpecConfig.plain(page_size), PerPosition(()))
