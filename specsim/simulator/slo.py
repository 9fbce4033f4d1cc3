"""Service-level objectives: bounds on the latencies of every request, and the requests that stay within all of them."""

import math
from dataclasses import asdict, dataclass, fields

import numpy as np

from specsim.core.errors import InputError, require
from specsim.simulator.bounds import positive
from specsim.simulator.results import Run

GOODPUT = "Request Goodput (req/s)"  # as vLLM's benchmark names it
ATTAINMENT = "SLO Attainment (%)"
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Largest latencies of a request, in seconds; infinity: no bound."""

    ttft: float = math.inf
    tpot: float = math.inf  # per token after the first; a request of one token has none, and stays within
    e2e: float = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) != math.inf:
                positive(field.name, getattr(self, field.name))
        require(min(self.bounds.values()) < math.inf, "slo", "no bound", "at least one of ttft, tpot and e2e")

    @property
    def bounds(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        given = {name: bound for name, bound in self.bounds.items() if bound < math.inf}
        return ", ".join(f"{name.upper()} ≤ {1e3 * bound:g} ms" for name, bound in given.items())

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read bounds with units, such as ttft=200ms,tpot=20ms,e2e=5s."""
        allowed = "NAME=TIME with ttft, tpot or e2e, and ms or s, such as ttft=200ms,tpot=20ms"
        bounds: dict[str, float] = {}
        for each in text.split(","):
            name, _, time = each.strip().partition("=")
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

    def within(self, run: Run) -> np.ndarray:
        """Find the requests within all bounds: bool [R]."""
        is_within = np.ones(len(run.arrivals), dtype=bool)
        for name, bound in self.bounds.items():
            if bound < math.inf:
                is_within &= ~(getattr(run, name) > bound)
        return is_within

    def metrics(self, run: Run) -> dict[str, float]:
        """Compute the metrics of a run, with requests per second within all bounds and their share."""
        good = self.within(run)
        return {
            **run.metrics(),
            GOODPUT: float(good.sum()) / run.duration,
            ATTAINMENT: 100 * float(good.mean()),
        }
