"""The protocols of policies, what serving asks them, and policies without measurement: a setting, or a sequence."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

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


class Choice(NamedTuple):
    """The setting of a round, and the draft steps of its requests."""

    setting: int  # number
    steps: np.ndarray | None = None  # int64 [B], of each request, at most the setting's; None: the setting's


FIRST_SETTING = Choice(0)  # the first setting, or the one that an engine has


@runtime_checkable
class RequestPolicy(Protocol):
    """A choice of draft steps for every request of a round, under a setting that has at least as many."""

    def choose_requests(self, requests: np.ndarray, contexts: np.ndarray) -> Choice:
        """Choose for requests of these ids [B] and committed lengths [B]."""
        ...

    def observe_requests(self, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
        """Observe the accepted drafts [B] of a round, as Policy.observe does."""
        ...


AnyPolicy = Policy | RequestPolicy


def choose(policy: AnyPolicy, requests: np.ndarray, contexts: np.ndarray) -> Choice:
    """Let a policy of either kind choose."""
    if isinstance(policy, RequestPolicy):
        return policy.choose_requests(requests, contexts)
    return Choice(policy.choose(contexts))


def observe(policy: AnyPolicy, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
    """Tell a policy of either kind what a round accepted."""
    if isinstance(policy, RequestPolicy):
        policy.observe_requests(requests, choice, accepted, seconds)
    else:
        policy.observe(choice.setting, accepted, seconds)


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
