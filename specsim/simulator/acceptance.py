"""Acceptance distributions: number of drafts that the rounds of a batch accept.

A distribution is a function of named uniforms, not of a stream of random numbers. A request's rounds are the same in
any batch. A shorter chain accepts what a longer one does, up to its own length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice, require_int
from specsim.core.limits import Probability, StepCount
from specsim.simulator.bounds import number, probability
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms

SCHEDULES = ("independent", "minimum-variance")


@dataclass(frozen=True, slots=True)
class DraftedRounds:
    """Rounds to be verified, one per request."""

    request_ids: np.ndarray  # int64 [B]
    indices: np.ndarray  # int64 [B], number of earlier rounds of the request
    positions: np.ndarray  # int64 [B], number of earlier output tokens of the request
    uniforms: np.ndarray  # f64 [B] in [0, 1), named by request and position


@runtime_checkable
class DraftAcceptance(Protocol):
    """Number of accepted drafts, round by round."""

    @property
    def num_steps(self) -> int:
        """Largest number of drafts that a round may accept."""
        ...

    def accepted(self, rounds: DraftedRounds) -> np.ndarray:
        """Draw the accepted drafts of every round, int64 [B] in [0, num_steps]."""
        ...


@runtime_checkable
class Distribution(DraftAcceptance, Protocol):
    """Acceptance with a closed form."""

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        """Compute the unconditional share of rounds that accept at least 1, 2, ... drafts, f64 [S].

        num_steps: cuts rounds to that number of drafts.
        """
        ...


@check_arguments
def accept_length(distribution: Distribution, num_steps: StepCount | None = None) -> float:
    """Compute the mean tokens of a round, bonus included; num_steps as in Distribution.rates."""
    return 1.0 + float(np.sum(distribution.rates(num_steps)))


@check_arguments
@dataclass(frozen=True, slots=True)
class PerPosition:
    """Acceptance with given unconditional rates by position.

    Under `independent` each round has its own uniform. Under `minimum-variance` the rounds of a request follow the
    rates
    as closely as whole numbers can (core.synthetic_acceptance).
    """

    by_position: tuple[float, ...]  # share of the rounds that accept at least i + 1 drafts; never increases
    schedule: Literal["independent", "minimum-variance"] = "independent"
    seed: int = 0  # names the phases of minimum-variance
    _ascending: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = tuple(probability("by_position", rate) for rate in _items("by_position", self.by_position))
        if not all(before >= after for before, after in pairwise((1.0, *values))):
            raise InputError("by_position", self.by_position, "unconditional rates, none larger than the one before")
        object.__setattr__(self, "by_position", values)
        object.__setattr__(self, "_ascending", np.array(values[::-1]))

    @property
    def num_steps(self) -> int:
        return len(self.by_position)

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        return np.array(self.by_position[:num_steps])

    def accepted(self, rounds: DraftedRounds) -> np.ndarray:
        if self.schedule == "minimum-variance":
            return self._counts(rounds, rounds.indices + 1) - self._counts(rounds, rounds.indices)
        return self.num_steps - self._ascending.searchsorted(rounds.uniforms, side="right")

    def _counts(self, rounds: DraftedRounds, num_rounds: np.ndarray) -> np.ndarray:
        """Count drafts accepted in the first `num_rounds` rounds of each request: one rounding per position."""
        names = keys(self.seed, UniformStream.PHASE, rounds.request_ids)
        total = np.zeros(len(num_rounds), dtype=np.int64)
        reached = num_rounds
        before = 1.0
        for position, rate in enumerate(self.by_position):
            share = rate / before if before else 0.0
            reached = np.floor(reached * share + named_uniforms(names, position)).astype(np.int64)
            total = total + reached
            before = rate
        return total


@check_arguments
def iid(rate: Probability, num_steps: StepCount) -> PerPosition:
    """Accept every draft after an accepted one with the same probability (Leviathan et al., arXiv 2211.17192)."""
    return PerPosition(tuple(float(rate**step) for step in range(1, num_steps + 1)))


@check_arguments
def iid_of_length(length: float, num_steps: StepCount) -> PerPosition:
    """Find the i.i.d. distribution of this accept length, bonus included."""
    most = num_steps + 1
    number("accept_length", length, 1, most)
    if length in (1, most):
        return iid(float(length == most), num_steps)
    from scipy.optimize import brentq  # slow to load, and seldom needed

    excess = lambda rate: sum(rate**step for step in range(most)) - length  # noqa: E731
    return iid(cast(float, brentq(excess, 0, 1, xtol=1e-15)), num_steps)


@check_arguments
def steady(length: float, num_steps: StepCount) -> PerPosition:
    """Find the distribution of this accept length with the least variance: whole rates, a fraction, then zeros."""
    number("accept_length", length, 1, num_steps + 1)
    rates = tuple(float(np.clip(length - step, 0, 1)) for step in range(1, num_steps + 1))
    return PerPosition(rates, "minimum-variance")


@check_arguments
@dataclass(frozen=True, slots=True)
class Mixture:
    """Requests of several kinds: each follows one part, chosen by its weight, in all of its rounds.

    rates are those over rounds where requests of every kind have equally many tokens: kinds that accept less need more
    rounds, so a part counts by weight over accept length.
    """

    parts: tuple[Distribution, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.parts or len({part.num_steps for part in self.parts}) != 1:
            raise InputError("parts", self.parts, "at least one distribution, all of equally many steps")
        weights = [number("weights", weight) for weight in _items("weights", self.weights)]
        if len(weights) != len(self.parts) or not 0 < sum(weights) < np.inf:
            raise InputError("weights", self.weights, f"{len(self.parts)} numbers of at least 0, not all 0")

    @property
    def num_steps(self) -> int:
        return self.parts[0].num_steps

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        share = np.array(self.weights) / [accept_length(part, num_steps) for part in self.parts]
        return share @ np.stack([part.rates(num_steps) for part in self.parts]) / share.sum()

    def accepted(self, rounds: DraftedRounds) -> np.ndarray:
        return np.choose(self.kinds(rounds.request_ids), [part.accepted(rounds) for part in self.parts])

    def kinds(self, request_ids: np.ndarray) -> np.ndarray:
        """Choose the part that each request follows, int64 [B]."""
        ends = np.cumsum(self.weights) / np.sum(self.weights)
        part_indices = np.searchsorted(
            ends, named_uniforms(keys(self.seed, UniformStream.PART, request_ids), 0), side="right"
        )
        return np.minimum(part_indices, len(self.parts) - 1)


@dataclass(frozen=True, slots=True)
class RecordedAcceptance:
    """Recorded acceptance of real requests, played back; requests and their ends wrap around.

    By `position` an entry is the number of drafts that a round from there accepted, so settings of fewer steps see the
    same requests.
    """

    counts: tuple[np.ndarray, ...]  # accepted drafts of every recorded request, by round or by output position
    num_steps: int  # of the recorded setting
    by: Literal["round", "position"] = "round"
    _flat: np.ndarray = field(init=False, repr=False, compare=False)
    _starts: np.ndarray = field(init=False, repr=False, compare=False)
    _lengths: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_int("num_steps", self.num_steps, 0)
        require_choice("by", self.by, ("round", "position"))
        counts = [np.asarray(request, dtype=np.int64) for request in self.counts]
        if not counts or min(map(len, counts)) == 0:
            raise InputError("counts", f"{len(counts)} requests", "at least one, each of at least one entry")
        flat = np.concatenate(counts)
        if flat.min() < 0 or flat.max() > self.num_steps:
            worst = int(flat.min() if flat.min() < 0 else flat.max())
            raise InputError("counts", worst, f"accepted drafts, 0 to num_steps, {self.num_steps}")
        lengths = np.array([len(request) for request in counts])
        for name, value in (("_flat", flat), ("_lengths", lengths), ("_starts", np.cumsum(lengths) - lengths)):
            object.__setattr__(self, name, value)

    def accepted(self, rounds: DraftedRounds) -> np.ndarray:
        requests = rounds.request_ids % len(self._lengths)
        places = rounds.indices if self.by == "round" else rounds.positions
        return self._flat[self._starts[requests] + places % self._lengths[requests]]

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        """Compute unconditional rates over the rounds of one pass through every recorded request."""
        played = (
            self._flat
            if self.by == "round"
            else np.concatenate([walk(by_position, num_steps) for by_position in self.counts])
        )
        return np.array([(played >= step).mean() for step in range(1, self.num_steps + 1)])[:num_steps]


def walk(by_position: np.ndarray, num_steps: int | None = None) -> np.ndarray:
    """Compute the accepted drafts of a request's rounds, given those of a round from every position.

    num_steps: of a shorter chain, which accepts at most that many.
    """
    limited = np.asarray(by_position) if num_steps is None else np.minimum(by_position, num_steps)
    positions = []
    position = 0
    while position < len(limited):
        positions.append(position)
        position += int(limited[position]) + 1
    return limited[positions]


@dataclass(frozen=True, slots=True)
class Callback:
    """Acceptance computed by a function of the rounds, such as a verifier."""

    function: Callable[[DraftedRounds], ArrayLike]  # integers [B]
    num_steps: int

    def accepted(self, rounds: DraftedRounds) -> np.ndarray:
        counts = np.asarray(self.function(rounds))
        fits = counts.shape == rounds.request_ids.shape and counts.dtype.kind in "iu"
        if not fits or (counts.size and not 0 <= counts.min() <= counts.max() <= self.num_steps):
            raise InputError("function", counts.tolist(), f"{len(rounds.uniforms)} integers from 0 to {self.num_steps}")
        return counts.astype(np.int64)


def _items(name: str, values: object) -> list[Any]:
    if not isinstance(values, (tuple, list, np.ndarray)):
        raise InputError(name, values, "a tuple of numbers")
    return list(values)


class Cost(Protocol):
    """Seconds of forwards; see specsim.simulator.cost.CostModel."""

    def prefill(self, new_tokens: np.ndarray, contexts: np.ndarray) -> float: ...

    def round(self, contexts: np.ndarray, config: SpecConfig) -> float: ...

    def mixed(self, new_tokens: np.ndarray, behind: np.ndarray, contexts: np.ndarray, config: SpecConfig) -> float: ...


@check_arguments
@dataclass(frozen=True, slots=True)
class Option:
    """A setting of speculation and the acceptance of its drafts."""

    config: SpecConfig
    acceptance: DraftAcceptance

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


@lru_cache(maxsize=256)
def mean_rounds(option: Option, tokens: int) -> float:
    """Compute the mean rounds until a request has this many tokens; surplus tokens of the last round are dropped."""
    rates = option.rates
    exactly = -np.diff([1.0, *rates, 0.0])  # share of rounds that accept 0, 1, ... drafts
    rounds = np.zeros(tokens + 1)
    for length in range(1, tokens + 1):
        before = np.maximum(length - 1 - np.arange(len(exactly)), 0)
        rounds[length] = 1 + exactly @ rounds[before]
    return float(rounds[tokens])
