"""Exploration of a function of uniforms: the regions on which all of its comparisons have the same results.

The function is called with exact numbers. A comparison whose result depends on the point of the explored region divides
the region in two; the function is called again for the other part. One comparison reads one uniform, so every region is
a product of intervals, and together they fill the unit cube.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from specsim.correctness.exact.exact_number import ExactNumber, NotExact

Interval = tuple[Fraction, Fraction]
UNIT: Interval = (Fraction(0), Fraction(1))
MOST_COMPARISONS = 50_000  # of one function, over all its regions


class UniformCut(NamedTuple):
    """A comparison that divides a region."""

    uniform: int
    cut: Fraction
    is_below: bool  # whether the part below the cut is explored


@dataclass(frozen=True, slots=True)
class Box:
    """A region: an interval of each uniform."""

    intervals: tuple[Interval, ...]

    @property
    def volume(self) -> Fraction:
        """Compute its probability."""
        return math.prod((high - low for low, high in self.intervals), start=Fraction(1))

    def point(self, part: Fraction) -> list[float]:
        """Give the point at that share of every interval."""
        return [float(low + (high - low) * part) for low, high in self.intervals]


class _Visit:
    """One call of the function, in the region that the comparisons of `path` leave."""

    def __init__(self, names: Sequence[str], path: tuple[UniformCut, ...], num_comparisons: int) -> None:
        self.intervals = [UNIT] * len(names)
        self.uniforms = [ExactNumber(0, 1, _Uniform(self, index, name)) for index, name in enumerate(names)]
        self.path = path
        self.comparisons: list[UniformCut] = []
        self.num_comparisons = num_comparisons
        self.refused: str | None = None

    def is_below(self, uniform: int, cut: Fraction) -> bool:
        self.num_comparisons += 1
        if self.num_comparisons > MOST_COMPARISONS:
            raise self.refuse(f"it compares uniforms with more than {MOST_COMPARISONS:,} numbers in one tree")
        low, high = self.intervals[uniform]
        if not low < cut < high:
            return cut >= high
        index = len(self.comparisons)
        comparison = UniformCut(uniform, cut, True)
        if index < len(self.path):
            comparison = self.path[index]
            if comparison[:2] != (uniform, cut):
                raise self.refuse("two calls with the same numbers make different comparisons")
        self.comparisons.append(comparison)
        self.intervals[uniform] = (low, cut) if comparison.is_below else (cut, high)
        return comparison.is_below

    def refuse(self, what: str) -> NotExact:
        self.refused = self.refused or what
        return NotExact(what)


@dataclass(frozen=True, slots=True, eq=False)
class _Uniform:
    """A uniform within one call."""

    visit: _Visit
    index: int
    name: str

    def is_below(self, cut: Fraction) -> bool:
        return self.visit.is_below(self.index, cut)

    def refuse(self, what: str) -> NotExact:
        return self.visit.refuse(what)


class Explored(NamedTuple):
    """A region and the result of the function there."""

    box: Box
    result: Any  # an exception that the function raised, where it raised one
    refused: str | None  # reason for which the result is not exact, None where it is


def explore(function: Callable[[list[ExactNumber]], Any], names: Sequence[str]) -> Iterator[Explored]:
    """Yield every region of a function of uniforms with these names.

    The function must be deterministic. A result is refused if there are too many comparisons.
    """
    pending: list[tuple[UniformCut, ...]] = [()]
    num_comparisons = 0
    while pending:
        path = pending.pop()
        visit = _Visit(names, path, num_comparisons)
        try:
            result = function(list(visit.uniforms))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            result = error
        if len(visit.comparisons) < len(path):
            visit.refuse("two calls with the same numbers make different comparisons")
        num_comparisons = visit.num_comparisons
        cuts = visit.comparisons
        pending += [(*cuts[:index], cuts[index]._replace(is_below=False)) for index in range(len(path), len(cuts))]
        yield Explored(Box(tuple(visit.intervals)), result, visit.refused)
