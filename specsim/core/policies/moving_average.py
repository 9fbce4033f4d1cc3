"""SGLang's adaptive policy: steps that follow a moving average of accepted drafts, with hysteresis."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import require, require_int, require_number
from specsim.core.policies.policy import by_steps, number_of

_ANY = 1e9


@dataclass(frozen=True, slots=True)
class AverageRule:
    """The rule of one range of batch sizes; the defaults are SGLang's.

    Source: adaptive_spec_params.py of sgl-project/sglang at 015c872628e3 (2026).
    """

    candidate_steps: tuple[int, ...]
    ema_alpha: float = 0.2  # weight of a round in the average
    update_interval: int = 5  # rounds from one decision to the next
    warmup_batches: int = 10  # rounds before the first interval
    down_hysteresis: float = -0.25  # added to the average below which steps fall
    up_hysteresis: float = 0.0  # added to the average above which steps rise
    ceiling_coeff: float = 0.0  # above 0: steps that do not rise are at most ceil(average · coefficient), but 1

    def __post_init__(self) -> None:
        steps = tuple(sorted(set(self.candidate_steps)))
        require(steps and all(type(count) is int and count >= 0 for count in steps), "candidate_steps", steps, "counts")
        object.__setattr__(self, "candidate_steps", steps)
        require_number("ema_alpha", self.ema_alpha, 0, 1, "a number from 0 to 1")
        require_int("update_interval", self.update_interval)
        require_int("warmup_batches", self.warmup_batches, 0)
        for name in ("down_hysteresis", "up_hysteresis"):
            require_number(name, getattr(self, name), -_ANY, _ANY, "a number")
        require_number("ceiling_coeff", self.ceiling_coeff, 0, _ANY, "a number of at least 0")


class Average:
    """The average of one range of batch sizes, and the steps that it has chosen."""

    def __init__(self, rule: AverageRule, first: int) -> None:
        steps = rule.candidate_steps
        self._rule = rule
        self._index = steps.index(first) if first in steps else len(steps) // 2
        self._average = self.steps - 1.0
        self._num_rounds = 0

    @property
    def steps(self) -> int:
        return self._rule.candidate_steps[self._index]

    def add(self, accepted: np.ndarray, drafted: bool) -> None:
        """Add a round to the average; one without drafts only counts towards the next decision."""
        rule = self._rule
        if drafted:
            mean = float(accepted.sum()) / len(accepted)
            self._average = (1 - rule.ema_alpha) * self._average + rule.ema_alpha * mean
        self._num_rounds += 1
        late = self._num_rounds - rule.warmup_batches
        if late > 0 and late % rule.update_interval == 0:
            self._index = self._next_index()

    def _next_index(self) -> int:
        """Decide on steps: fewer while the average is below theirs, else more while it reaches the present ones.

        After rounds without drafts the fewest steps above 0 are tried, as nothing was measured meanwhile.
        """
        steps = self._rule.candidate_steps
        if not self.steps:
            index = min(1, len(steps) - 1)
            if steps[index] and self._average < 0:
                self._average = steps[index] - 1.0
            return index
        index = self._index
        while index and self._average <= abs(steps[index - 1] - 0.5) + self._rule.down_hysteresis:
            index -= 1  # 0 steps have the threshold of 1: rounds that accept next to nothing turn drafting off
        if index == self._index:
            while index < len(steps) - 1 and self._average > steps[index] - 0.5 + self._rule.up_hysteresis:
                index += 1
        return self._below_ceiling(index)

    def _below_ceiling(self, index: int) -> int:
        steps = self._rule.candidate_steps
        if self._rule.ceiling_coeff > 0 and index <= self._index:
            ceiling = max(1, int(np.ceil(self._average * self._rule.ceiling_coeff)))
            while index and steps[index] > ceiling:
                index -= 1
        return index


def rules_of(settings: Sequence[SpecConfig], rules: Mapping[int, AverageRule] | None) -> Mapping[int, AverageRule]:
    """Give rules by the lowest batch size, ascending, whose steps are those of settings; None: one rule of all."""
    if rules is None:
        return {1: AverageRule(tuple(by_steps(settings)))}
    require(min(rules, default=0) == 1, "rules", sorted(rules), "rules by lowest batch size, the first one 1")
    for rule in rules.values():
        for steps in rule.candidate_steps:
            number_of(settings, steps)
    return dict(sorted(rules.items()))


class MovingAverage:
    """SGLang's policy for settings of any tree: an AverageRule for each range of batch sizes.

    rules: by the lowest batch size of a range; None: one for all sizes, among all settings. first: number of steps at
    the start, where a rule has it. SGLang rounds a batch size up to a captured graph before.
    """

    def __init__(
        self, settings: Sequence[SpecConfig], rules: Mapping[int, AverageRule] | None = None, first: int | None = None
    ) -> None:
        self._steps = [config.num_steps for config in settings]
        self._numbers = by_steps(settings)
        sorted_rules = rules_of(settings, rules)
        self._lows = list(sorted_rules)
        start = max(self._numbers) if first is None else first
        self._averages = [Average(rule, start) for rule in sorted_rules.values()]

    def choose(self, contexts: np.ndarray) -> int:
        return self._numbers[self._of(len(contexts)).steps]

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        if len(accepted):
            self._of(len(accepted)).add(accepted, self._steps[setting] > 0)

    def _of(self, size: int) -> Average:
        return self._averages[bisect_right(self._lows, max(size, 1)) - 1]
