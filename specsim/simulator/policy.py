"""Policies that choose a setting for every round, and their comparison on equal traces.

Arrivals are the same for all policies. Uniforms are named by request and position, so a longer chain sees the same
draws as a shorter one. Options are chains, plain decoding among them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.simulator.bounds import count, number, probability
from specsim.simulator.option import Always, Cost, Option, Policy
from specsim.simulator.results import Run
from specsim.simulator.timeline import Prefill, simulate
from specsim.simulator.workload import Workload

PRIOR = 0.7  # assumed probability that a draft is accepted, before the first observation


class OffSwitch:
    """Speculation with option `on` in batches of at most `limit` requests, option `off` in larger ones."""

    def __init__(self, limit: int, on: int = 1, off: int = 0) -> None:
        self._limit = count("limit", limit, 0)
        self._on = on
        self._off = off

    def choose(self, contexts: np.ndarray) -> int:
        return self._on if len(contexts) <= self._limit else self._off

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        pass


class MovingAverage:
    """The shortest chain at least `margin` drafts longer than recent acceptance, else the longest.

    The average is exponential, a round with `weight`. Engines that adapt only to acceptance do this.
    """

    def __init__(self, options: Sequence[Option], weight: float = 0.1, margin: float = 0.75) -> None:
        self._chains = _chains(options)
        self._weight = probability("weight", weight)
        self._margin = number("margin", margin)
        self._average = float(np.median([chain.num_steps for chain in self._chains])) / 2

    def choose(self, contexts: np.ndarray) -> int:
        wanted = self._average + self._margin
        return next((chain for chain in self._chains if chain.num_steps >= wanted), self._chains[-1]).option

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        self._average += self._weight * (float(accepted.mean()) - self._average)


class Throughput:
    """The option with most tokens a second in recent batches of about this size (to a factor of 2).

    Every `explore`-th round of a size tries its options in turn; untried options come first.
    """

    def __init__(self, options: Sequence[Option], weight: float = 0.1, explore: int = 20) -> None:
        self._num_options = len(options)
        self._weight = probability("weight", weight)
        self._explore = count("explore", explore, 2)
        self._rates: dict[int, np.ndarray] = {}
        self._rounds: dict[int, int] = {}

    def choose(self, contexts: np.ndarray) -> int:
        size = len(contexts).bit_length()
        num_rounds = self._rounds.get(size, 0)
        if num_rounds < self._num_options:
            return num_rounds
        if num_rounds % self._explore == 0:
            return num_rounds // self._explore % self._num_options
        return int(self._rates[size].argmax())

    def observe(self, option: int, accepted: np.ndarray, seconds: float) -> None:
        size = len(accepted).bit_length()
        rates = self._rates.setdefault(size, np.full(self._num_options, np.nan))
        rate = (len(accepted) + float(accepted.sum())) / seconds
        known = not np.isnan(rates[option])
        rates[option] = rates[option] + self._weight * (rate - rates[option]) if known else rate
        self._rounds[size] = self._rounds.get(size, 0) + 1


class Goodput:
    """The option with most expected tokens a second (TurboSpec, arXiv 2406.14066).

    Tokens follow from recent acceptance rates, seconds from the cost model. Rates by position are exponential averages;
    positions that no recent round reached continue with the last known rate. Rounds without drafts observe nothing: the
    averages return to the prior, a tenth as fast, so that drafting is tried again.
    """

    def __init__(self, cost: Cost, options: Sequence[Option], weight: float = 0.02) -> None:
        self._cost = cost
        self._weight = probability("weight", weight)
        self._configs = [option.config for option in options]
        self._steps = [config.num_steps for config in self._configs]
        self._prior = PRIOR ** np.arange(1, _chains(options)[-1].num_steps + 1)
        self._rates = self._prior

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
    """Make policies by name: every option by itself, and one of each kind that chooses among all.

    limit: of the off-switch, between plain decoding and the longest chain.
    """
    lengths = [option.config.num_steps for option in options]
    require(0 in lengths, "options", f"{len(options)} chains", "chains and plain decoding (Option.plain)")
    static: dict[str, Policy] = {_name(steps): Always(option) for option, steps in enumerate(lengths)}
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
    """Run every policy on the same trace."""
    return {
        name: simulate(cost, options, workload, serving, prefill=prefill, policy=policy, seed=seed)
        for name, policy in policies(cost, options, limit).items()
    }


def _name(steps: int) -> str:
    return f"{steps} draft{'s' if steps > 1 else ''}" if steps else "no drafts"


class _Chain(NamedTuple):
    """An option with drafts."""

    num_steps: int
    option: int  # its number


def _chains(options: Sequence[Option]) -> list[_Chain]:
    """List the options with drafts, shortest first."""
    if any(option.config.topk != 1 for option in options):
        raise InputError("options", "a tree", "chains: the acceptance of one tree does not give that of another")
    found = sorted(_Chain(option.config.num_steps, at) for at, option in enumerate(options) if option.config.num_steps)
    require(found, "options", f"{len(options)} settings", "at least one that drafts")
    return found
