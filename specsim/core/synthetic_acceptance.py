"""Synthetic acceptance, for timing only: a schedule, not the target, decides how many drafts a round accepts.

It measures a serving system at a given acceptance, whatever the weights are. vLLM has it as rejection_sample_method
`synthetic` with synthetic_acceptance_rates; SGLang and llama.cpp simulate acceptance too.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_number
from specsim.core.limits import Seed

SCHEDULES = ("minimum-variance", "independent")
ONE = 2**24  # shares are counted in these, as random words are


@check_arguments
@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Share of the rounds that accept a draft at each position, and the schedule of those rounds.

    `independent`: a uniform decides every round of a request. `minimum-variance`: the counts follow the rates as
    closely as integers can. Of a request's first r rounds, the number that accept the first draft is one of the two
    integers around r · rates[0]. Given the number that accept i drafts, the number that accept one more is one of the
    two integers around its share of that. So for every r the count differs from r · rates[i] by less than i + 1.

    The accepted drafts are a path of the round's tree; the token after it is the target's. The tokens are therefore
    neither the target's nor lossless, and every output says so. Fewer are accepted where a tree is not deep enough, or
    where the length limit is reached.
    """

    rates: tuple[float, ...]  # [S], share of the rounds that accept at least i + 1 drafts (unconditional: never grows)
    schedule: Literal["minimum-variance", "independent"] = "minimum-variance"
    seed: Seed = 0  # names the uniforms

    def __post_init__(self) -> None:
        allowed = "one number from 0 to 1 for each step, none larger than the one before"
        require(isinstance(self.rates, (tuple, list)) and len(self.rates) > 0, "rates", self.rates, allowed)
        for before, rate in pairwise((1, *self.rates)):
            is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
            require(is_number and before >= rate >= 0, "rates", self.rates, allowed)
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))

    @classmethod
    def of_length(cls, accept_length: float, num_steps: int, **others: Any) -> Self:
        """Make the rates of a mean accept length, as vLLM and SGLang do.

        An accept_length of 2.6 in 3 steps gives (1, 0.6, 0).
        """
        most = num_steps + 1
        require_number("accept_length", accept_length, 1, most, f"a number from 1 to {most}, bonus included")
        return cls(tuple(min(max(accept_length - step, 0.0), 1.0) for step in range(1, num_steps + 1)), **others)

    def fit(self, num_steps: int) -> Self:
        """Return the acceptance itself, or raise InputError unless it has a rate for each step."""
        require(len(self.rates) == num_steps, "rates", self.rates, f"num_steps rates, {num_steps}")
        return self

    def cut(self, num_steps: int) -> "SyntheticAcceptance | None":
        """Make the acceptance of a setting with fewer steps, None for plain decoding."""
        allowed = f"at least num_steps rates, {num_steps}"
        require(len(self.rates) >= num_steps, "rates", self.rates, allowed)
        return replace(self, rates=self.rates[:num_steps]) if num_steps else None

    @property
    def shares(self) -> tuple[int, ...]:
        """Shares by position in units of 1/ONE: of all rounds (independent), or of those that accept the one before."""
        if self.schedule == "independent":
            return tuple(round(rate * ONE) for rate in self.rates)
        return tuple(round(rate / before * ONE) if before else 0 for before, rate in pairwise((1.0, *self.rates)))

    def __str__(self) -> str:
        return f"synthetic, {self.schedule} at rates {', '.join(f'{rate:g}' for rate in self.rates)}"


def acceptance_json(acceptance: SyntheticAcceptance | None, rule: str | None = None) -> dict:
    """Make the JSON under `acceptance` of every output: whether acceptance was synthetic, and its setting.

    rule: name of an AcceptanceRule.
    """
    if rule is not None:
        return {"synthetic": False, "rule": rule}
    if acceptance is None:
        return {"synthetic": False}
    return {
        "synthetic": True,
        "rates": list(acceptance.rates),
        "schedule": acceptance.schedule,
        "seed": acceptance.seed,
    }
