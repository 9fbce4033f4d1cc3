"""The policy protocol, and the policies that follow no measurement: one setting, or a recorded sequence."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_int


class Policy(Protocol):
    """A choice of one of several settings for every round.

    Choices depend on what was passed to the policy and on nothing else, so equal runs choose alike.
    """

    def choose(self, contexts: np.ndarray) -> int:
        """Choose a setting by number, for requests of these committed lengths [B]."""
        ...

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        """Observe the accepted drafts [B] of a round of this setting, and the seconds of its step.

        Rounds are observed in the order of their choices, under an overlap schedule one choice late.
        """
        ...


class Always:
    """The policy that always takes the same setting."""

    def __init__(self, setting: int = 0) -> None:
        self.setting = setting

    def choose(self, contexts: np.ndarray) -> int:
        return self.setting

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        pass


class Scripted:
    """The settings of a recorded run, in order; after the last one, from the first on again."""

    def __init__(self, choices: Sequence[int]) -> None:
        require(choices, "choices", "none", "at least one number of a setting")
        self._choices = [require_int("choices", choice, 0) for choice in choices]
        self._round = 0

    def choose(self, contexts: np.ndarray) -> int:
        choice = self._choices[self._round % len(self._choices)]
        self._round += 1
        return choice

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        pass


def by_steps(settings: Sequence[SpecConfig]) -> Mapping[int, int]:
    """Map the numbers of steps of settings, which differ, to the settings' own numbers, shortest first."""
    numbers = {config.num_steps: number for number, config in enumerate(settings)}
    require(len(numbers) == len(settings), "settings", "two of one num_steps", "settings of different num_steps")
    return dict(sorted(numbers.items()))


def number_of(settings: Sequence[SpecConfig], steps: int) -> int:
    """Find the setting with a number of steps, or raise InputError."""
    numbers = by_steps(settings)
    if steps not in numbers:
        raise InputError("num_steps", steps, f"one of the settings', {', '.join(map(str, numbers))}")
    return numbers[steps]
