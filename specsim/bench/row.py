"""Rows of a benchmark: a time exists only after the equality check of its operation has passed."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

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
class PerformanceTarget:
    """A figure and its upper limit."""

    name: str  # name of the figure
    value: float  # measured value; nan for none
    limit: float  # largest value that reaches the target

    @property
    def reached(self) -> bool:
        """Whether the value is at most the limit."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One operation under one setting.

    Raises ValueError for a timing of a contender without a passed check.
    """

    name: str
    setting: Mapping[str, Any]
    checks: Mapping[str, Check]  # by contender, ours first (ours, baselines)
    timings: Mapping[str, Timing] = field(default_factory=dict)  # by contender
    bound: RooflineBound | None = None  # bytes and operations that no implementation can avoid
    bound_us: float = math.nan  # their time at the measured peaks of this run
    targets: tuple[PerformanceTarget, ...] = ()
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
                name: {"compared": check.compared, "error": check.error, "limit": check.limit, "passed": check.passed}
                | ({"difference": check.difference} if check.difference else {})
                for name, check in self.checks.items()
            },
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "roofline_bound": self.bound and self.bound.to_json(),
            "roofline_bound_us": self.bound_us,
            "time_over_bound": self.ratio,
            "targets": [asdict(target) | {"reached": target.reached} for target in self.targets],
            "notes": list(self.notes),
            "figures": dict(self.figures),
        }


def equal(compared: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Check:
    """Compare every tensor bit for bit; error: number of entries that differ."""
    differing = 0
    first = ""
    for name, tensor in expected.items():
        ours = actual[name]
        if ours.shape != tensor.shape:
            return Check(compared, float("inf"), 0, f"{name} has shape {tuple(ours.shape)}, not {tuple(tensor.shape)}")
        wrong = (_bits(ours) != _bits(tensor.to(ours.device))).flatten().nonzero()[:, 0]
        differing += len(wrong)
        if len(wrong) and not first:
            index = int(wrong[0])
            first = f"{name}, entry {index}: {ours.flatten()[index].item()}, not {tensor.flatten()[index].item()}"
    return Check(compared, float(differing), 0, first)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize]) if tensor.is_floating_point() else tensor


def within(compared: str, actual: torch.Tensor, exact: torch.Tensor, budget: torch.Tensor | float) -> Check:
    """Compare entries with exact ones within a budget; error: the largest error over its budget."""
    if actual.shape != exact.shape:
        return Check(compared, float("inf"), 1, f"shape {tuple(actual.shape)}, not {tuple(exact.shape)}")
    share = ((actual.to(exact.dtype) - exact).abs() / budget).flatten()
    share = torch.where(share.isnan(), torch.inf, share)
    index = int(share.argmax())
    error = float(share[index])
    values = (actual.flatten()[index].item(), exact.flatten()[index].item())
    where = f"entry {index} of shape {tuple(actual.shape)}: {values[0]:.6g}, exact {values[1]:.6g}"
    return Check(compared, error, 1, "" if error <= 1 else where)


def all_of(compared: str, *checks: Check) -> Check:
    """Combine several checks: the failed one, else the one with the largest error over its limit."""
    worst = max(checks, key=lambda check: (not check.passed, check.error / check.limit if check.limit else check.error))
    difference = "" if worst.passed else f"{worst.compared}: {worst.difference or worst.error}"
    return Check(compared, worst.error, worst.limit, difference)
