"""Synthetic acceptance: how many drafts a round accepts is decided by a schedule, not by the target. For timing only.

Random weights agree about never, and a drafter in training not yet as it will: what a serving system makes of a given
acceptance can be measured all the same. vLLM has it as rejection_sample_method `synthetic` and calls the rates
synthetic_acceptance_rates, SGLang and llama.cpp simulate too.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from specsim.core.errors import InputError

SCHEDULES = ("minimum-variance", "independent")
ONE = 2**24  # shares are counted in these, as random words are


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """What share of the rounds accepts a draft at each position, and how the rounds that do are spread.

    rates: rates[i] is the share of the rounds that accept at least i + 1 drafts (unconditional, so they never grow),
    one for each step. schedule: `independent`, a uniform decides every round of a request anew; `minimum-variance`, of
    the first r rounds of a request the number that accept the first draft is one of the two integers around r ·
    rates[0], and given the number that accept i drafts the number that accept one more is one of the two around its
    share of
    that: whatever r is, r · rates[i] is missed by less than i + 1. seed: names the uniforms.

    The accepted drafts are a path of the round's tree; the token after it is the target's, and whatever follows is as
    ever. So the tokens are neither the target's nor lossless: everything that shows or writes results says so. Where a
    tree is not as deep as its round is to accept, or the longest text is reached, fewer are accepted.
    """

    rates: tuple[float, ...]
    schedule: Literal["minimum-variance", "independent"] = "minimum-variance"
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = "one number from 0 to 1 for each step, none larger than the one before"
        if not isinstance(self.rates, (tuple, list)) or not self.rates:
            raise InputError("rates", self.rates, allowed)
        numbers = all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in self.rates)
        if not numbers or not all(1 >= before >= after >= 0 for before, after in pairwise((1, *self.rates))):
            raise InputError("rates", self.rates, allowed)
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))
        if self.schedule not in SCHEDULES:
            raise InputError("schedule", self.schedule, " or ".join(SCHEDULES))
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise InputError("seed", self.seed, "an integer from 0 to 2^64 - 1")

    @classmethod
    def of_length(cls, accept_length: float, num_steps: int, **others) -> "SyntheticAcceptance":
        """Rates of which a round's tokens vary least around this mean, bonus included: 2.6 of 3 steps is (1, 0.6, 0).

        vLLM and SGLang make them so of an acceptance length.
        """
        number = isinstance(accept_length, (int, float)) and not isinstance(accept_length, bool)
        if not number or not 1 <= accept_length <= num_steps + 1:
            raise InputError("accept_length", accept_length, f"a number from 1 to {num_steps + 1}, bonus included")
        return cls(tuple(min(max(accept_length - step, 0.0), 1.0) for step in range(1, num_steps + 1)), **others)

    def fit(self, num_steps: int) -> "SyntheticAcceptance":
        """Itself, where it has a rate for each step of the setting."""
        if len(self.rates) != num_steps:
            raise InputError("rates", self.rates, f"num_steps rates, {num_steps}")
        return self

    @property
    def shares(self) -> tuple[int, ...]:
        """By position in units of 1/ONE: of all rounds (independent), else of those that accept the draft before it."""
        if self.schedule == "independent":
            return tuple(round(rate * ONE) for rate in self.rates)
        return tuple(round(rate / before * ONE) if before else 0 for before, rate in pairwise((1.0, *self.rates)))

    def __str__(self) -> str:
        return f"synthetic, {self.schedule} at rates {', '.join(f'{rate:g}' for rate in self.rates)}"


def acceptance_json(acceptance: SyntheticAcceptance | None) -> dict:
    """What every output has under `acceptance`: whether it was synthetic, and then what was asked for."""
    if acceptance is None:
        return {"synthetic": False}
    return {
        "synthetic": True,
        "rates": list(acceptance.rates),
        "schedule": acceptance.schedule,
        "seed": acceptance.seed,
    }
