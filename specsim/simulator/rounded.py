"""Printed numbers, each with all values that are printed alike."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounded:
    """A number of at least 0 and the interval that it was rounded from; results of arithmetic keep theirs."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, half_unit: float = 0.0) -> "Rounded":
        """Make a printed number; half_unit: half of the last printed place, 0 for an exact number."""
        return cls(value, max(value - half_unit, 0.0), value + half_unit)

    def __add__(self, other: "Rounded") -> "Rounded":
        return Rounded(self.value + other.value, self.low + other.low, self.high + other.high)

    def __sub__(self, other: "Rounded") -> "Rounded":
        return Rounded(self.value - other.value, self.low - other.high, self.high - other.low)

    def __mul__(self, other: "Rounded") -> "Rounded":
        corners = [one * two for one in (self.low, self.high) for two in (other.low, other.high)]
        return Rounded(self.value * other.value, min(corners), max(corners))

    def __truediv__(self, other: "Rounded") -> "Rounded":
        """Divide by a number above 0."""
        corners = [_ratio(one, two) for one in (self.low, self.high) for two in (other.low, other.high)]
        return Rounded(_ratio(self.value, other.value), min(corners), max(corners))

    def equals(self, other: "Rounded", within: float) -> bool:
        """Whether both may stand for one number; within: relative difference that is ignored."""
        gap = max(self.low - other.high, other.low - self.high)
        return gap <= within * max(abs(self.value), abs(other.value))

    def integers(self, within: float) -> range:
        """List the integers that it may stand for; empty for a number that is not finite."""
        if not math.isfinite(self.low) or not math.isfinite(self.high):
            return range(0)
        margin = within * abs(self.value)
        return range(math.ceil(self.low - margin), math.floor(self.high + margin) + 1)


def _ratio(one: float, two: float) -> float:
    return one / two if two else math.copysign(math.inf, one)
