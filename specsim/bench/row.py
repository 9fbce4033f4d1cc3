"""Rows of a benchmark: a time exists only after the equality check of its operation has passed."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specsim.bench.roofline import RooflineBound

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Check:
    """One equality check of this run."""

    compared: str  # subject of the check, in words
    error: float  # largest error found; nan for none
    limit: float  # largest error that passes
    difference: str = ""  # in words, where it failed

    @property
    def passed(self) -> bool:
        """Whether the error is at most the limit."""
        return not math.isnan(self.error) and self.error <= self.limit and not self.difference


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one operation."""

    median_us: float  # median time, in microseconds
    spread: float  # interquartile range in per cent of the median; nan for one measurement
    samples: int  # number of measurements


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its upper limit."""

    name: str  # name of the figure
    value: float  # measured value; nan for none
    limit: float  # largest value that reaches the target

    @property
    def reached(self) -> bool:
        """Whether the value is at most the limit."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One operation under one setting.

    Raises ValueError for a timing of a contender without a passed check.
    """

    name: str
    setting: Mapping[str, Any]
    checks: Mapping[str, Check]  # by contender, ours first (ours, baselines)
    timings: Mapping[str, Timing] = field(default_factory=dict)  # by contender
    bound: RooflineBound | None = None  # bytes and operations that no implementation can avoid
    bound_us: float = math.nan  # their time at the measured peaks of this run
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)  # measured in addition to times, by name
    group: str = ""  # of its suite

    def __post_init__(self) -> None:
        for name in self.timings:
            if name not in self.checks or not self.checks[name].passed:
                raise ValueError(f"{self.name}: a time of {name!r} without a passed check")

    @property
    def passed(self) -> bool:
        """Whether every contender passed its check."""
        return all(check.passed for check in self.checks.values())

    @property
    def ours_us(self) -> float:
        """Our median; NaN where there is none."""
        return self.timings[OURS].median_us if OURS in self.timings else math.nan

    @property
    def ratio(self) -> float:
        """Our time over the roofline bound; NaN where either is missing."""
        return self.ours_us / self.bound_us if self.bound_us else math.nan

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "name": self.name,
            "group": self.group,
            "setting": dict(self.setting),
            "checks": {
                name: {"compared": each.compared, "error": each.error, "limit": each.limit, "passed": each.passed}
                | ({"difference": each.difference} if each.difference else {})
                for name, each in self.checks.items()
            },
            "timings": {name: asdict(each) for name, each in self.timings.items()},
            "roofline_bound": self.bound and self.bound.to_json(),
            "roofline_bound_us": self.bound_us,
            "time_over_bound": self.ratio,
            "targets": [asdict(each) | {"reached": each.reached} for each in self.targets],
            "notes": list(self.notes),
            "figures": dict(self.figures),
        }
