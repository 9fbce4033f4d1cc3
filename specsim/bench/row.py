"""What a benchmark prints: figures that exist only where the equality check of their operation has passed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specsim.bench.roofline import Floor

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Check:
    """One equality check of this run: what was compared, the error found, and the largest that is allowed.

    difference: where it failed, what differs.
    """

    what: str
    error: float
    limit: float
    difference: str = ""

    @property
    def passed(self) -> bool:
        return not math.isnan(self.error) and self.error <= self.limit and not self.difference


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one operation: the median of `samples`, and their interquartile range in per cent of it."""

    median_us: float
    spread: float
    samples: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A figure that is asked for: at most `limit`."""

    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One operation under one setting.

    checks, timings: by contender, `ours` first. floor: what no implementation can avoid, floor_us how long that takes
    at the ceilings measured in this run. ValueError for a timing whose contender has no passed check.
    """

    name: str
    setting: Mapping[str, Any]
    checks: Mapping[str, Check]
    timings: Mapping[str, Timing] = field(default_factory=dict)
    floor: Floor | None = None
    floor_us: float = math.nan
    asked: tuple[Asked, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        for name in self.timings:
            if name not in self.checks or not self.checks[name].passed:
                raise ValueError(f"{self.name}: a time of {name!r} without a passed check")

    @property
    def passed(self) -> bool:
        """Whether every contender gave what it should."""
        return all(check.passed for check in self.checks.values())

    @property
    def ours_us(self) -> float:
        """Our median; NaN where there is none."""
        return self.timings[OURS].median_us if OURS in self.timings else math.nan

    @property
    def ratio(self) -> float:
        """Our time over the floor; NaN where either is missing."""
        return self.ours_us / self.floor_us if self.floor_us else math.nan

    @property
    def best_rival(self) -> tuple[str, Timing] | None:
        """The fastest of those whose name does not begin with ours."""
        rivals = {name: timing for name, timing in self.timings.items() if not name.startswith(OURS)}
        name = min(rivals, key=lambda name: rivals[name].median_us, default=None)
        return name and (name, rivals[name])

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        return {
            "name": self.name,
            "setting": dict(self.setting),
            "checks": {
                name: {"what": each.what, "error": each.error, "limit": each.limit, "passed": each.passed}
                | ({"difference": each.difference} if each.difference else {})
                for name, each in self.checks.items()
            },
            "timings": {
                name: {"median_us": each.median_us, "spread": each.spread, "samples": each.samples}
                for name, each in self.timings.items()
            },
            "floor": self.floor and self.floor.to_json(),
            "floor_us": self.floor_us,
            "ratio": self.ratio,
            "asked": [
                {"what": each.what, "value": each.value, "limit": each.limit, "met": each.met} for each in self.asked
            ],
            "notes": list(self.notes),
        }
