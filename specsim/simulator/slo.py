"""Service-level objectives: bounds on the latencies of requests, and the highest arrival rate within them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.limits import PositiveNumber, ReplicateCount, Share
from specsim.simulator.acceptance import Option
from specsim.simulator.candidates import seeds
from specsim.simulator.cell import Cell
from specsim.simulator.results import ATTAINMENT, GOODPUT, SimulatedRun

_UNITS = {"ms": 1e-3, "s": 1.0}


@check_arguments
@dataclass(frozen=True, slots=True)
class Slo:
    """Largest latencies of a request, in seconds; infinity: no bound."""

    ttft: PositiveNumber = math.inf  # largest time to the first token, in seconds; infinity: no bound
    # largest time per token after the first, in seconds; infinity: no bound. A request of one token stays within.
    tpot: PositiveNumber = math.inf
    e2e: PositiveNumber = math.inf  # largest time to the last token, in seconds; infinity: no bound

    def __post_init__(self) -> None:
        require(min(self.bounds.values()) < math.inf, "slo", "no bound", "at least one of ttft, tpot and e2e")

    @property
    def bounds(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        finite = {name: bound for name, bound in self.bounds.items() if bound < math.inf}
        return ", ".join(f"{name.upper()} ≤ {1e3 * bound:g} ms" for name, bound in finite.items())

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read bounds with units, such as ttft=200ms,tpot=20ms,e2e=5s."""
        allowed = "NAME=TIME with ttft, tpot or e2e, and ms or s, such as ttft=200ms,tpot=20ms"
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, time = part.strip().partition("=")
            name = "e2e" if name == "e2el" else name
            unit = "ms" if time.endswith("ms") else "s"
            try:
                seconds = float(time.removesuffix(unit)) * _UNITS[unit]
            except ValueError:
                seconds = 0.0
            is_time = time.endswith(unit) and 0 < seconds < math.inf
            if name not in cls.__dataclass_fields__ or name in bounds or not is_time:
                raise InputError("slo", text, allowed)
            bounds[name] = seconds
        return cls(**bounds)

    def within(self, run: SimulatedRun) -> np.ndarray:
        """Find the requests within all bounds: bool [R]."""
        is_within = np.ones(len(run.arrivals), dtype=bool)
        for name, bound in self.bounds.items():
            if bound < math.inf:
                is_within &= ~(getattr(run, name) > bound)
        return is_within

    def metrics(self, run: SimulatedRun) -> dict[str, float]:
        """Compute the metrics of a run, with requests per second within all bounds and their share."""
        good = self.within(run)
        return {
            **run.metrics(),
            GOODPUT: float(good.sum()) / run.duration,
            ATTAINMENT: 100 * float(good.mean()),
        }


PRECISION = 1.01  # ratio of the least known rate above the bounds to the highest within them
MOST = 2.0**20  # requests/s, for all requests at once
LEAST = 2.0**-10


@check_arguments
@dataclass(frozen=True, slots=True)
class RateGoal:
    """Objectives, and the share of requests that has to stay within them."""

    slo: Slo
    share: Share = 0.99  # of the requests of all replicates together
    replicates: ReplicateCount = 1  # runs of every rate, each with other requests; the same for all rates and settings


@dataclass(frozen=True, slots=True)
class HighestRate:
    """Highest rate of a setting."""

    config: SpecConfig
    rate: float  # requests/s; infinity if all requests may come at once


@check_arguments
def highest_rate(cell: Cell, option: Option, goal: RateGoal, start: float = 1.0) -> float:
    """Find by bisection the highest rate of a setting within the objectives, to PRECISION.

    Every rate has the same requests, uniforms and, up to the scale, the same times. A run starts with an empty server.
    start: first rate that is tried. A slightly higher rate can be within the objectives where a lower one is not; then
    the result, which is within them, lies below one of several such rates, and start decides below which. Infinity if
    all requests may come at once; 0 if even LEAST is too much.
    """
    if is_within(cell, option, goal, MOST):
        return math.inf
    if not is_within(cell, option, goal, LEAST):
        return 0.0
    low = high = start
    while low > LEAST and not is_within(cell, option, goal, low):
        low, high = max(low / 2, LEAST), low
    while high == low or is_within(cell, option, goal, high):
        low, high = high, 2 * high
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_within(cell, option, goal, middle) else (low, middle)
    return low


def is_within(cell: Cell, option: Option, goal: RateGoal, rate: float) -> bool:
    """Whether the share of requests stays within the objectives at a rate; stops as soon as too many do not."""
    late = 0
    for seed in seeds(cell.seed, goal.replicates):
        scenario = cell.with_values(seed=seed, rate=rate).serving(option)
        size = len(scenario.workload)
        allowed = int((1 - goal.share) * size * goal.replicates + 1e-9)
        late += size - int(goal.slo.within(scenario.run(option)).sum())
        if late > allowed:
            return False
    return True


def best_rate(
    cell: Cell, options: Sequence[Option], goal: RateGoal, done: Callable[[], object] = lambda: None
) -> HighestRate | None:
    """Find the setting of the highest rate; None if no setting is within the objectives at any rate.

    A setting is bisected only if it is within them at a rate above the best so far, by PRECISION. done: called for each
    option.
    """
    best: HighestRate | None = None
    for option in options:
        start = 1.0 if best is None else min(best.rate * PRECISION, MOST)
        if best is None or (best.rate < math.inf and is_within(cell, option, goal, start)):
            rate = highest_rate(cell, option, goal, start)
            best = HighestRate(option.config, rate) if rate else best
        done()
    return best
