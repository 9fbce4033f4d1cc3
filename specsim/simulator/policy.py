"""Policies that choose a setting for every round, and their comparison on equal traces.

A trace is equal for all: requests arrive alike, and their uniforms are named by request and position, so that a chain
of more drafts meets what a shorter one met. Options are chains, plain decoding among them.
"""

from collections.abc import Sequence

import numpy as np

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import check_number
from specsim.simulator.option import Always, Cost, Option, Policy
from specsim.simulator.results import Run
from specsim.simulator.timeline import Prefill, simulate
from specsim.simulator.workload import Workload, check_count

PRIOR = 0.7  # a draft is taken to be accepted with this probability until rounds have said more


class OffSwitch:
    """Speculates with option `on` in batches of at most `limit` requests, and takes option `off` in larger ones."""

    def __init__(self, limit: int, on: int = 1, off: int = 0):
        self._limit, self._on, self._off = check_count("limit", limit), on, off

    def choose(self, contexts: np.ndarray) -> int:
        return self._on if len(contexts) <= self._limit else self._off

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        pass


class MovingAverage:
    """The shortest chain that is at least `margin` drafts longer than what rounds accept of late, else the longest.

    The average is exponential, a round with `weight`; what engines do that adapt to acceptance alone.
    """

    def __init__(self, options: Sequence[Option], weight: float = 0.1, margin: float = 0.75):
        self._steps = _drafting(options)
        self._weight, self._margin = check_number("weight", weight), check_number("margin", margin, 0, np.inf)
        self._average = float(np.median([steps for steps, _ in self._steps])) / 2

    def choose(self, contexts: np.ndarray) -> int:
        wanted = self._average + self._margin
        return next((option for steps, option in self._steps if steps >= wanted), self._steps[-1][1])

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        self._average += self._weight * (float(accepted.mean()) - self._average)


class Throughput:
    """What made most tokens a second of late in batches of about this size (to a factor of 2).

    Every `explore`-th round of a size tries its options in turn; until each was tried they come first.
    """

    def __init__(self, options: Sequence[Option], weight: float = 0.1, explore: int = 20):
        self._num_options, self._weight = len(options), check_number("weight", weight)
        self._explore = check_count("explore", explore, 2)
        self._rates: dict[int, np.ndarray] = {}
        self._rounds: dict[int, int] = {}

    def choose(self, contexts: np.ndarray) -> int:
        size = self._size(len(contexts))
        count = self._rounds.get(size, 0)
        if count < self._num_options:
            return count
        if count % self._explore == 0:
            return count // self._explore % self._num_options
        return int(self._rates[size].argmax())

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        size = self._size(len(accepted))
        rates = self._rates.setdefault(size, np.full(self._num_options, np.nan))
        rate = (len(accepted) + float(accepted.sum())) / seconds
        known = not np.isnan(rates[option])
        rates[option] = rates[option] + self._weight * (rate - rates[option]) if known else rate
        self._rounds[size] = self._rounds.get(size, 0) + 1

    def _size(self, batch: int) -> int:
        return batch.bit_length()


class Goodput:
    """Most expected tokens a second: those that the rates of late promise over what the cost model says a round of
    this batch takes (TurboSpec, arXiv 2406.14066).

    Rates by position are exponential averages; positions that no round of late reached go on as the last known one did.
    Rounds without drafts say nothing: what was known is forgotten, a tenth as fast, so that drafting is tried again.
    """

    def __init__(self, cost: Cost, options: Sequence[Option], weight: float = 0.02):
        self._cost, self._weight = cost, check_number("weight", weight)
        self._configs = [option.config for option in options]
        self._steps = [config.num_steps for config in self._configs]
        _drafting(options)
        self._prior = self._rates = PRIOR ** np.arange(1, max(self._steps) + 1)

    def choose(self, contexts: np.ndarray) -> int:
        expected = 1 + np.concatenate([[0.0], np.cumsum(self._rates)])
        seconds = [self._cost.round(contexts, config) for config in self._configs]
        return int(np.argmax([expected[steps] / each for steps, each in zip(self._steps, seconds, strict=True)]))

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        steps = self._steps[option]
        if not steps:
            self._rates = self._rates + self._weight / 10 * (self._prior - self._rates)
            return
        reached = (accepted[:, None] >= np.arange(1, steps + 1)).mean(axis=0)
        rates = self._rates.copy()
        rates[:steps] += self._weight * (reached - rates[:steps])
        before = rates[steps - 2] if steps > 1 else 1.0
        going_on = rates[steps - 1] / before if before else 0.0
        beyond = np.arange(1, len(rates) - steps + 1)
        rates[steps:] = rates[steps - 1] * going_on**beyond
        self._rates = rates


def policies(cost: Cost, options: Sequence[Option], limit: int) -> dict[str, Policy]:
    """One of each kind by name: every option by itself, and those that choose among all. limit: of the off-switch,
    which goes between plain decoding and the longest chain.
    """
    lengths = [option.config.num_steps for option in options]
    if 0 not in lengths:
        raise InputError("options", f"{len(options)} chains", "chains and plain decoding (Option.plain)")
    static = {_name(steps): Always(number) for number, steps in enumerate(lengths)}
    return static | {
        f"off above {limit}": OffSwitch(limit, lengths.index(max(lengths)), lengths.index(0)),
        "moving average": MovingAverage(options),
        "throughput": Throughput(options),
        "goodput": Goodput(cost, options),
    }


def compare(
    cost: Cost,
    options: Sequence[Option],
    workload: Workload,
    serving: ServingConfig | None = None,
    *,
    limit: int = 32,
    prefill: Prefill = "mixed",
    seed: int = 0,
) -> dict[str, Run]:
    """A run of every policy on the same trace."""
    return {
        name: simulate(cost, options, workload, serving, prefill=prefill, policy=policy, seed=seed)
        for name, policy in policies(cost, options, limit).items()
    }


def _name(steps: int) -> str:
    return f"{steps} draft{'s' if steps > 1 else ''}" if steps else "no drafts"


def _drafting(options: Sequence[Option]) -> list[tuple[int, int]]:
    """(steps, number) of the options that draft, shortest first."""
    if any(option.config.topk != 1 for option in options):
        raise InputError("options", "a tree", "chains: what a tree accepts says nothing of another")
    found = sorted((option.config.num_steps, number) for number, option in enumerate(options))
    found = [each for each in found if each[0]]
    if not found:
        raise InputError("options", f"{len(options)} settings", "at least one that drafts")
    return found
