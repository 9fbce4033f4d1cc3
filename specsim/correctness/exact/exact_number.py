"""Exact numbers: fractions, and affine functions of one uniform whose comparisons divide its range.

A rule of a user that runs on these numbers compares as it would with floats. Each comparison of a uniform with a
fraction splits the range of that uniform at one point (`exploration`), so the regions of the rule follow from the rule.
"""

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch


class NotExact(Exception):
    """A rule does something with a number that has no exact result."""


class Side(Protocol):
    """The uniform of an exact number, which decides on which side of a point it lies."""

    @property
    def name(self) -> str:
        """The uniform's name."""
        ...

    def is_below(self, cut: Fraction) -> bool:
        """Check whether the uniform is below the point, within the region that is explored."""
        ...

    def refuse(self, what: str) -> NotExact:
        """Make the error for something that has no exact result, and remember it."""
        ...


class ExactNumber:
    """The number offset + slope · u, where u is a uniform; slope is 0 for a fraction."""

    __slots__ = ("offset", "side", "slope")

    def __init__(self, offset: Fraction | int, slope: Fraction | int = 0, side: Side | None = None) -> None:
        self.offset = Fraction(offset)
        self.slope = Fraction(slope)
        self.side = side if slope else None

    def _refuse(self, what: str) -> NotExact:
        return NotExact(what) if self.side is None else self.side.refuse(what)

    def _plus(self, other: Any, sign: int) -> Any:
        if (value := lifted(other)) is None:
            return NotImplemented
        if self.side is not None and value.side is not None and self.side is not value.side:
            raise self._refuse(f"it combines two uniforms, {self.side.name} and {value.side.name}")
        slope = self.slope + sign * value.slope
        return ExactNumber(self.offset + sign * value.offset, slope, self.side or value.side)

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._plus(other, 1)

    def __neg__(self) -> "ExactNumber":
        return ExactNumber(-self.offset, -self.slope, self.side)

    def __pos__(self) -> "ExactNumber":
        return self

    def __abs__(self) -> "ExactNumber":
        return -self if self < 0 else self

    def __mul__(self, other: Any) -> Any:
        if (value := lifted(other)) is None:
            return NotImplemented
        if self.side is not None and value.side is not None:
            raise self._refuse(f"it multiplies {self.side.name} by {value.side.name}")
        fixed, free = (self, value) if self.side is None else (value, self)
        return ExactNumber(fixed.offset * free.offset, fixed.offset * free.slope, free.side)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if (value := lifted(other)) is None:
            return NotImplemented
        if value.side is not None:
            raise value._refuse(f"it divides by {value.side.name}")
        return self * ExactNumber(1 / value.offset)

    def __rtruediv__(self, other: Any) -> Any:
        value = lifted(other)
        return NotImplemented if value is None else value / self

    def __pow__(self, other: Any) -> Any:
        if self.side is not None or not isinstance(other, int):
            raise self._refuse(f"it raises a number to the power {other}")
        return ExactNumber(self.offset**other)

    def _is(self, compare: Callable[[Any, Any], bool], other: Any) -> Any:
        """Compare with a number.

        Where the two are equal at one point only, a uniform does not lie at that point.
        """
        if isinstance(other, float) and not math.isfinite(other):
            return compare(0.0, other)
        if (value := lifted(other)) is None:
            return NotImplemented
        difference = self - value
        if difference.side is None:
            return compare(difference.offset, 0)
        if compare in (operator.eq, operator.ne):
            return compare is operator.ne
        is_below = difference.side.is_below(-difference.offset / difference.slope)
        return compare(-1 if is_below == (difference.slope > 0) else 1, 0)

    def __lt__(self, other: Any) -> Any:
        return self._is(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._is(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._is(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._is(operator.ge, other)

    def __eq__(self, other: object) -> Any:
        return self._is(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._is(operator.ne, other)

    def __hash__(self) -> int:
        return hash(self._fraction("it looks a number up by its hash"))

    def __bool__(self) -> bool:
        return self.side is not None or self.offset != 0

    def _fraction(self, what: str) -> Fraction:
        """Return the number, or raise NotExact where it depends on a uniform."""
        if self.side is not None:
            raise self._refuse(f"{what}, which depends on {self.side.name}")
        return self.offset

    def __float__(self) -> float:
        return float(self._fraction("it turns a number into a float"))

    def __floor__(self) -> int:
        """Round down, one comparison for each integer in the range."""
        if self.side is None:
            return math.floor(self.offset)
        value = math.floor(min(self.offset, self.offset + self.slope))
        while not self < value + 1:
            value += 1
        return value

    def __ceil__(self) -> int:
        return -math.floor(-self)

    def __int__(self) -> int:
        return math.ceil(self) if self < 0 else math.floor(self)

    __trunc__ = __int__

    def __repr__(self) -> str:
        return str(self.offset) if self.side is None else f"{self.offset} + {self.slope} · {self.side.name}"

    # What a tensor of one element has besides.

    def item(self) -> "ExactNumber":
        """Return the number, as torch.Tensor.item would as a float."""
        return self

    double = float = clone = detach = cpu = item

    def clamp(self, min: Any = None, max: Any = None) -> "ExactNumber":
        """Limit the number to a range."""
        value = self if min is None or not self < min else ExactNumber(0) + min
        return value if max is None or not value > max else ExactNumber(0) + max


def lifted(value: Any) -> ExactNumber | None:
    """Make an exact number of a finite number of Python, numpy or torch; None for anything else."""
    if isinstance(value, ExactNumber):
        return value
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (int, Fraction)):
        return ExactNumber(Fraction(value))
    if isinstance(value, float) and math.isfinite(value):
        return ExactNumber(Fraction(value))
    return None
