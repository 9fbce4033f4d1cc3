"""Policies that choose the draft steps of every request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import require, require_int, require_number
from specsim.core.policies.goodput import Rates, RoundCost
from specsim.core.policies.moving_average import Average, AverageRule, rules_of
from specsim.core.policies.policy import Choice, by_steps
from specsim.core.settings import with_steps

MOST_REQUESTS = 4096  # of which a policy remembers what it measured, those that it saw last
_ITERATIONS = 20  # towards the best ratio, which takes two or three
T = TypeVar("T")


def check_settings(settings: Sequence[SpecConfig]) -> None:
    """Raise InputError for settings of different topk, between which a number of steps does not decide."""
    topk = {config.topk for config in settings if config.num_steps}
    require(len(topk) < 2, "topk", sorted(topk), "the same in all settings of a policy per request")
    by_steps(settings)


def covering(settings: Sequence[SpecConfig], steps: np.ndarray) -> Choice:
    """Choose the setting of fewest steps that has those of every request."""
    most = int(steps.max(initial=0))
    enough = [number for count, number in by_steps(settings).items() if count >= most]
    require(enough, "script", most, "at most the most steps of the settings")
    return Choice(enough[0], steps)


class ByRequest(Generic[T]):
    """A value of each request, made when the request is new, for the requests that were seen last."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}  # the latest last

    def of(self, request: int) -> T:
        value = self._values.pop(request) if request in self._values else self._make()
        self._values[request] = value
        if len(self._values) > MOST_REQUESTS:
            del self._values[next(iter(self._values))]
        return value


class RequestScript:
    """Draft steps of each request's rounds, in order; after the last ones, from the first on again.

    An entry is a number of steps, or those of the round's setting and of the request. The request of id i starts with
    entry i, so that requests of one round differ.
    """

    def __init__(self, settings: Sequence[SpecConfig], script: Sequence[int | Sequence[int]]) -> None:
        require(script, "script", "none", "at least one number of draft steps")
        self._settings = settings
        self._script = [(entry, entry) if isinstance(entry, int) else (entry[0], entry[1]) for entry in script]
        most = max(by_steps(settings))
        for round_steps, request_steps in self._script:
            require_int("script", request_steps, 0, round_steps)
            require_int("script", round_steps, request_steps, most)
        self._rounds: ByRequest[list[int]] = ByRequest(lambda: [0])

    def choose_requests(self, requests: np.ndarray, contexts: np.ndarray) -> Choice:
        entries = [self._next(int(request)) for request in requests]
        most = np.array([entry[0] for entry in entries], dtype=np.int64)
        return Choice(covering(self._settings, most).setting, np.array([entry[1] for entry in entries], dtype=np.int64))

    def _next(self, request: int) -> tuple[int, int]:
        count = self._rounds.of(request)
        entry = self._script[(request + count[0]) % len(self._script)]
        count[0] += 1
        return entry

    def observe_requests(self, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
        pass


class RequestAverages:
    """SGLang's moving average with hysteresis, one for each request and range of batch sizes.

    rules, first: as for MovingAverage.
    """

    def __init__(
        self, settings: Sequence[SpecConfig], rules: Mapping[int, AverageRule] | None = None, first: int | None = None
    ) -> None:
        check_settings(settings)
        self._settings = settings
        start = max(by_steps(settings)) if first is None else first
        sorted_rules = rules_of(settings, rules)
        self._lows = np.array(list(sorted_rules))
        self._averages = [ByRequest(lambda rule=rule: Average(rule, start)) for rule in sorted_rules.values()]

    def choose_requests(self, requests: np.ndarray, contexts: np.ndarray) -> Choice:
        averages = self._of(len(requests))
        steps = np.array([averages.of(int(request)).steps for request in requests], dtype=np.int64)
        return covering(self._settings, steps)

    def observe_requests(self, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
        averages = self._of(len(requests))
        for request, count, steps in zip(requests, accepted, _steps(choice, requests), strict=True):
            averages.of(int(request)).add(np.array([count]), bool(steps))

    def _of(self, size: int) -> ByRequest[Average]:
        return self._averages[int(np.searchsorted(self._lows, max(size, 1), side="right")) - 1]


class RequestGoodput:
    """The setting, and steps of each request within it, with most expected tokens a second.

    As Goodput, from each request's own acceptance rates. row_seconds: seconds that a dead row of verify saves. They are
    0 where verify computes all rows, as the engines of this package do: a request then stops drafting only where its
    drafts are never accepted. weight: of a round.
    """

    def __init__(
        self, cost: RoundCost, settings: Sequence[SpecConfig], weight: float = 0.1, row_seconds: float = 0.0
    ) -> None:
        check_settings(settings)
        require_number("weight", weight, 0, 1, "a number from 0 to 1")
        require_number("row_seconds", row_seconds, 0, np.finfo(float).max, "a number of at least 0")
        most = max(by_steps(settings))
        require(most, "settings", f"{len(settings)} settings", "at least one that drafts")
        self._cost = cost
        self._settings = tuple(settings)
        self._row_seconds = row_seconds
        largest = max(settings, key=lambda config: config.num_steps)
        rows = [with_steps(largest, steps).num_draft_tokens for steps in range(most + 1)]
        self._rows = np.array(rows, dtype=float)
        self._rates: ByRequest[Rates] = ByRequest(lambda: Rates(most, weight))

    def choose_requests(self, requests: np.ndarray, contexts: np.ndarray) -> Choice:
        expected_BW = np.array([self._rates.of(int(request)).expected for request in requests])
        seconds = [self._cost.round(contexts, config) for config in self._settings]
        choices = [self._best(number, expected_BW, seconds) for number in range(len(self._settings))]
        return max(choices, key=lambda scored: scored[0])[1]

    def _best(self, number: int, expected_BW: np.ndarray, seconds: Sequence[float]) -> tuple[float, Choice]:
        """Find the steps with most tokens a second under a setting: (tokens a second, choice).

        A draft is worth its row as long as it brings more tokens than the row's seconds do (Dinkelbach's iteration for
        a ratio). Of equal steps the fewest are chosen. Dead rows save no more than another setting would.
        seconds: of a round by setting.
        """
        width = self._settings[number].num_steps + 1
        saved_W = self._row_seconds * (self._rows[width - 1] - self._rows[:width])
        steps = np.full(len(expected_BW), width - 1)
        rate = 0.0
        for _ in range(_ITERATIONS):
            tokens = float(np.take_along_axis(expected_BW, steps[:, None], 1).sum())
            rate = tokens / max(seconds[number] - float(saved_W[steps].sum()), min(seconds))
            better = (expected_BW[:, :width] + rate * saved_W).argmax(1)
            if (better == steps).all():
                break
            steps = better
        return rate, Choice(number, steps)

    def observe_requests(self, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
        for request, count, steps in zip(requests, accepted, _steps(choice, requests), strict=True):
            self._rates.of(int(request)).add(int(steps), np.array([count]))


def _steps(choice: Choice, requests: np.ndarray) -> np.ndarray:
    """Give the steps of each request, which a policy per request has chosen."""
    return np.zeros(len(requests), dtype=np.int64) if choice.steps is None else choice.steps
