"""A policy that predicts: expected tokens a second from measured acceptance and a cost of rounds."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_int, require_number
from specsim.core.policies.policy import by_steps

PRIOR = 0.7  # assumed probability that a draft is accepted, before the first observation


class RoundCost(Protocol):
    """Seconds of a round, such as those of the simulator's cost model."""

    def round(self, contexts: np.ndarray, config: SpecConfig, /) -> float: ...


class CostTable:
    """Seconds of a round by batch size and num_steps, given as numbers; between two sizes they grow in proportion.

    Beyond the largest size they go on as between the last two.
    """

    def __init__(self, batch_sizes: Sequence[int], seconds: Mapping[int, Sequence[float]]) -> None:
        sizes = [require_int("batch_sizes", size) for size in batch_sizes]
        require(sizes and sizes == sorted(set(sizes)), "batch_sizes", sizes, "ascending batch sizes")
        for steps, values in seconds.items():
            allowed = f"{len(sizes)} numbers above 0, one for each batch size"
            require(len(values) == len(sizes), "seconds", list(values), allowed)
            for value in values:
                require_number("seconds", value, np.finfo(float).tiny, np.finfo(float).max, allowed)
            require_int("num_steps", steps, 0)
        self._sizes = np.array(sizes, dtype=float)
        self._seconds = {steps: np.array(values, dtype=float) for steps, values in seconds.items()}

    def round(self, contexts: np.ndarray, config: SpecConfig) -> float:
        """Look up the seconds of a round of this many requests, whatever their lengths."""
        if config.num_steps not in self._seconds:
            raise InputError("seconds", config.num_steps, f"seconds for num_steps {config.num_steps} too")
        values = self._seconds[config.num_steps]
        size = len(contexts)
        if size <= self._sizes[-1] or len(values) < 2:
            return float(np.interp(size, self._sizes, values))
        slope = (values[-1] - values[-2]) / (self._sizes[-1] - self._sizes[-2])
        return float(values[-1] + max(slope, 0.0) * (size - self._sizes[-1]))


class Rates:
    """Exponential averages of acceptance rates by position, over rounds of requests.

    Rounds without drafts observe nothing: the averages return to the prior, a tenth as fast as one request would move
    them. weight: of one request's round.
    """

    def __init__(self, most_steps: int, weight: float) -> None:
        self._weight = weight
        self._prior = PRIOR ** np.arange(1, most_steps + 1)
        self._rates = self._prior

    @property
    def expected(self) -> np.ndarray:
        """Expected tokens of a round by its steps, f64 [most_steps + 1]."""
        return 1 + np.concatenate([[0.0], np.cumsum(self._rates)])

    def add(self, steps: int, accepted: np.ndarray) -> None:
        """Add rounds of this number of steps, each with its accepted drafts."""
        if not steps:
            self._rates = self._rates + self._weight / 10 * (self._prior - self._rates)
            return
        reached = (accepted[:, None] >= np.arange(1, steps + 1)).mean(axis=0)
        rates = self._rates.copy()
        rates[:steps] += (1 - (1 - self._weight) ** len(accepted)) * (reached - rates[:steps])
        before = rates[steps - 2] if steps > 1 else 1.0
        going_on = rates[steps - 1] / before if before else 0.0
        beyond = np.arange(1, len(rates) - steps + 1)
        rates[steps:] = rates[steps - 1] * going_on**beyond
        self._rates = rates


class Goodput:
    """The setting with most expected tokens a second (TurboSpec, arXiv 2406.14066).

    Tokens follow from recent acceptance rates, seconds from a cost. Rates by position are exponential averages over
    rounds of requests, so a round of a large batch counts more. Positions that no recent round reached continue with
    the last known rate. Rounds without drafts observe nothing: the averages return to the prior, a tenth as fast as one
    request would move them, so that drafting is tried again. Settings have the same topk, as the rates of a tree are
    not those of a chain. weight: of one request's round.
    """

    def __init__(self, cost: RoundCost, settings: Sequence[SpecConfig], weight: float = 0.02) -> None:
        require_number("weight", weight, 0, 1, "a number from 0 to 1")
        drafting = [config for config in settings if config.num_steps]
        require(drafting, "settings", f"{len(settings)} settings", "at least one that drafts")
        topk = {config.topk for config in drafting}
        require(len(topk) == 1, "topk", sorted(topk), "the same in all settings that draft")
        self._cost = cost
        self._settings = tuple(settings)
        self._steps = [config.num_steps for config in settings]
        self._rates = Rates(max(by_steps(settings)), weight)

    def choose(self, contexts: np.ndarray) -> int:
        expected = self._rates.expected
        seconds = [self._cost.round(contexts, config) for config in self._settings]
        rates = [expected[steps] / cost for steps, cost in zip(self._steps, seconds, strict=True)]
        return int(np.argmax(rates))

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        self._rates.add(self._steps[setting], accepted)
