"""Uniforms in fractions: cells between breakpoints, on each of which a verifier's outcome is constant."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

INSIDE = (Fraction(1, 64), Fraction(1, 2), Fraction(63, 64))  # where in a cell a verifier is called
GRID = 2**24  # specsim.core.uniforms.named_uniforms: k / GRID, k from 1 to GRID - 1, 1 twice as often as the others


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of what one uniform (or one position's noise) can be: its probability, and as many points of it as INSIDE.

    edges: of an interval of uniforms.
    """

    volume: Fraction
    points: tuple[float | tuple[float, ...], ...]
    edges: tuple[Fraction, Fraction] | None = None


Axis = Sequence[Cell]
ANY: Axis = (
    Cell(Fraction(1), tuple(map(float, INSIDE)), (Fraction(0), Fraction(1))),
)  # of a uniform that nobody reads


def cells(cuts: Iterable[Fraction], low: Fraction = Fraction(0), high: Fraction = Fraction(1)) -> Axis:
    """The cells of a uniform that is uniform between low and high."""
    edges = sorted({low, high, *(cut for cut in cuts if low < cut < high)})
    return [
        Cell((end - start) / (high - low), tuple(float(start + (end - start) * part) for part in INSIDE), (start, end))
        for start, end in pairwise(edges)
    ]


def with_zero(axis: Axis, mass: Fraction) -> Axis:
    """A uniform that is exactly 0 with that probability."""
    zero = Cell(mass, (0.0,) * len(INSIDE))
    return [zero, *(Cell(cell.volume * (1 - mass), cell.points, cell.edges) for cell in axis)]


def cdf_cuts(weights: Sequence[Fraction]) -> list[Fraction]:
    """Where the draw of a token by inverse CDF changes."""
    total = sum(weights)
    return [edge / total for edge in accumulate(weights)]


def grid_cost(axis: Axis) -> Fraction:
    """At most how far, in total variation, the cell of a uniform on the grid is from that of a uniform one.

    A point of the grid that is an edge may belong to either side.
    """
    return sum((_most_error(*cell.edges) for cell in axis if cell.edges), Fraction(0)) / 2


def _most_error(low: Fraction, high: Fraction) -> Fraction:
    first, last = math.floor(low * GRID) + 1, math.ceil(high * GRID) - 1
    inside = max(0, min(last, GRID - 1) - max(first, 1) + 1) + (first <= 1 <= last)
    at_edges = sum(edge * GRID == int(edge * GRID) and 0 < edge < 1 for edge in (low, high))
    width = high - low
    return max(abs(Fraction(mass, GRID) - width) for mass in (inside, inside + at_edges))
