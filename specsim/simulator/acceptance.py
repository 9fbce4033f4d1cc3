"""Laws of acceptance: how many drafts the rounds of a batch accept.

A law is a function of named uniforms, not of a stream of random numbers: a request's rounds are the same in any batch,
and what n drafts of a chain would have done is known to every shorter chain (it accepts the smaller of both numbers).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
from scipy.optimize import brentq

from specsim.core.errors import InputError
from specsim.simulator.uniforms import Stream, keys, named_uniforms

SCHEDULES = ("independent", "minimum-variance")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds about to be verified, one a request, all [B].

    request_ids, indices (how many rounds the request has had), positions (how many tokens it has put out): int64.
    uniforms: float64 in [0, 1), named by request and position.
    """

    request_ids: np.ndarray
    indices: np.ndarray
    positions: np.ndarray
    uniforms: np.ndarray


class Acceptance(Protocol):
    """num_steps: the most drafts that a round may accept."""

    num_steps: int

    def accepted(self, rounds: Rounds) -> np.ndarray:
        """Accepted drafts of every round, int64 [B] in [0, num_steps]."""


class Law(Acceptance, Protocol):
    """Acceptance with a closed form."""

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        """Share of rounds, cut to num_steps if given, that accept at least 1, 2, ... drafts: unconditional, f64 [S]."""


def accept_length(law: Law, num_steps: int | None = None) -> float:
    """Mean tokens of a round, bonus included; num_steps as in Law.rates."""
    return 1.0 + float(np.sum(law.rates(num_steps)))


@dataclass(frozen=True, slots=True)
class PerPosition:
    """Given unconditional rates by position.

    by_position: by_position[i] is the share of the rounds that accept at least i + 1 drafts, so it never grows.
    schedule: `independent`, a uniform decides every round; `minimum-variance`, the rounds of a request follow the rates
    as closely as whole numbers can (core.synthetic_acceptance). seed: names its phases.
    """

    by_position: tuple[float, ...]
    schedule: Literal["independent", "minimum-variance"] = "independent"
    seed: int = 0
    _ascending: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        values = tuple(check_number("by_position", rate) for rate in _sequence("by_position", self.by_position))
        if not all(before >= after for before, after in pairwise((1.0, *values))):
            raise InputError("by_position", self.by_position, "unconditional rates, none larger than the one before")
        object.__setattr__(self, "by_position", values)
        object.__setattr__(self, "_ascending", np.array(values[::-1]))
        if self.schedule not in SCHEDULES:
            raise InputError("schedule", self.schedule, " or ".join(SCHEDULES))

    @property
    def num_steps(self) -> int:
        return len(self.by_position)

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        return np.array(self.by_position[:num_steps])

    def accepted(self, rounds: Rounds) -> np.ndarray:
        if self.schedule == "minimum-variance":
            return self._counts(rounds, rounds.indices + 1) - self._counts(rounds, rounds.indices)
        return self.num_steps - self._ascending.searchsorted(rounds.uniforms, side="right")

    def _counts(self, rounds: Rounds, num_rounds: np.ndarray) -> np.ndarray:
        """Drafts that the first `num_rounds` rounds of each request accept in all: one rounding a position."""
        names = keys(self.seed, Stream.PHASE, rounds.request_ids)
        total, reached, before = np.zeros(len(num_rounds), dtype=np.int64), num_rounds, 1.0
        for position, rate in enumerate(self.by_position):
            share = rate / before if before else 0.0
            reached = np.floor(reached * share + named_uniforms(names, position)).astype(np.int64)
            total, before = total + reached, rate
        return total


def iid(rate: float, num_steps: int) -> PerPosition:
    """Every draft after an accepted one is accepted with the same probability (Leviathan et al., arXiv 2211.17192)."""
    rate, num_steps = check_number("rate", rate), _check_steps(num_steps)
    return PerPosition(tuple(rate**step for step in range(1, num_steps + 1)))


def iid_of_length(length: float, num_steps: int) -> PerPosition:
    """The i.i.d. law of this accept length, bonus included."""
    most = _check_steps(num_steps) + 1
    check_number("accept_length", length, 1, most)
    if length in (1, most):
        return iid(float(length == most), num_steps)
    return iid(brentq(lambda rate: sum(rate**step for step in range(most)) - length, 0, 1, xtol=1e-15), num_steps)


def steady(length: float, num_steps: int) -> PerPosition:
    """The law of this accept length whose rounds vary least: whole rates, a broken one, then zeros."""
    check_number("accept_length", length, 1, _check_steps(num_steps) + 1)
    rates = tuple(float(np.clip(length - step, 0, 1)) for step in range(1, num_steps + 1))
    return PerPosition(rates, "minimum-variance")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Requests of several kinds: each follows one of the parts, chosen by its weight, for all of its rounds.

    rates are those over rounds where requests of every kind have equally many tokens: kinds that accept less need more
    rounds, so a part counts by weight over accept length.
    """

    parts: tuple[Law, ...]
    weights: tuple[float, ...]
    seed: int = 0

    def __post_init__(self):
        if not self.parts or len({part.num_steps for part in self.parts}) != 1:
            raise InputError("parts", self.parts, "at least one law, all of equally many steps")
        weights = [check_number("weights", weight, 0, np.inf) for weight in _sequence("weights", self.weights)]
        if len(weights) != len(self.parts) or not 0 < sum(weights) < np.inf:
            raise InputError("weights", self.weights, f"{len(self.parts)} numbers of at least 0, not all 0")

    @property
    def num_steps(self) -> int:
        return self.parts[0].num_steps

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        share = np.array(self.weights) / [accept_length(part, num_steps) for part in self.parts]
        return share @ np.stack([part.rates(num_steps) for part in self.parts]) / share.sum()

    def accepted(self, rounds: Rounds) -> np.ndarray:
        return np.choose(self.kinds(rounds.request_ids), [part.accepted(rounds) for part in self.parts])

    def kinds(self, request_ids: np.ndarray) -> np.ndarray:
        """Which part each request follows, int64."""
        ends = np.cumsum(self.weights) / np.sum(self.weights)
        found = np.searchsorted(ends, named_uniforms(keys(self.seed, Stream.PART, request_ids), 0), side="right")
        return np.minimum(found, len(self.parts) - 1)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of real requests, played back; requests and their ends wrap around.

    counts: for every recorded request its accepted drafts, by round or by output position. num_steps: of the setting.
    by `position` says for every position what a round that began there accepted: then settings of fewer steps meet the
    same requests.
    """

    counts: tuple[np.ndarray, ...]
    num_steps: int
    by: Literal["round", "position"] = "round"
    _flat: np.ndarray = field(init=False, repr=False, compare=False)
    _starts: np.ndarray = field(init=False, repr=False, compare=False)
    _lengths: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        _check_steps(self.num_steps)
        if self.by not in ("round", "position"):
            raise InputError("by", self.by, "round or position")
        counts = [np.asarray(each, dtype=np.int64) for each in self.counts]
        if not counts or min(map(len, counts)) == 0:
            raise InputError("counts", f"{len(counts)} requests", "at least one, each of at least one entry")
        flat = np.concatenate(counts)
        if flat.min() < 0 or flat.max() > self.num_steps:
            worst = int(flat.min() if flat.min() < 0 else flat.max())
            raise InputError("counts", worst, f"accepted drafts, 0 to num_steps, {self.num_steps}")
        lengths = np.array([len(each) for each in counts])
        for name, value in (("_flat", flat), ("_lengths", lengths), ("_starts", np.cumsum(lengths) - lengths)):
            object.__setattr__(self, name, value)

    def accepted(self, rounds: Rounds) -> np.ndarray:
        requests = rounds.request_ids % len(self._lengths)
        places = rounds.indices if self.by == "round" else rounds.positions
        return self._flat[self._starts[requests] + places % self._lengths[requests]]

    def rates(self, num_steps: int | None = None) -> np.ndarray:
        """Of the rounds of one pass through every recorded request."""
        played = self._flat if self.by == "round" else np.concatenate([walk(each, num_steps) for each in self.counts])
        return np.array([(played >= step).mean() for step in range(1, self.num_steps + 1)])[:num_steps]


def walk(by_position: np.ndarray, num_steps: int | None = None) -> np.ndarray:
    """Accepted drafts of the rounds that a request goes through, given those of a round from every position.

    num_steps: of a shorter chain, which accepts at most that many.
    """
    limited = np.asarray(by_position) if num_steps is None else np.minimum(by_position, num_steps)
    places, place = [], 0
    while place < len(limited):
        places.append(place)
        place += int(limited[place]) + 1
    return limited[places]


@dataclass(frozen=True, slots=True)
class Judged:
    """Whoever is asked says how many drafts are accepted: a verifier in the loop, passed as a function."""

    judge: Callable[[Rounds], Sequence[int]]
    num_steps: int

    def accepted(self, rounds: Rounds) -> np.ndarray:
        counts = np.asarray(self.judge(rounds))
        fits = counts.shape == rounds.request_ids.shape and counts.dtype.kind in "iu"
        if not fits or (counts.size and not 0 <= counts.min() <= counts.max() <= self.num_steps):
            raise InputError("judge", counts.tolist(), f"{len(rounds.uniforms)} integers from 0 to {self.num_steps}")
        return counts.astype(np.int64)


def check_number(name: str, value: object, least: float = 0, most: float = 1) -> float:
    """A finite number within bounds; InputError otherwise."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not least <= value <= min(most, sys.float_info.max):
        allowed = f"from {least:g} to {most:g}" if most < np.inf else f"of at least {least:g}"
        raise InputError(name, value, f"a number {allowed}")
    return float(value)


def _check_steps(num_steps: int) -> int:
    if type(num_steps) is not int or num_steps < 0:
        raise InputError("num_steps", num_steps, "an integer of at least 0")
    return num_steps


def _sequence(name: str, values: object) -> Sequence:
    if not isinstance(values, (tuple, list, np.ndarray)):
        raise InputError(name, values, "a tuple of numbers")
    return values
