"""Regions of a uniform between breakpoints, in fractions: a verifier has one outcome on each."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

INSIDE = (Fraction(1, 64), Fraction(1, 2), Fraction(63, 64))  # positions in a region at which a verifier is called
GRID = 2**24  # specsim.core.uniforms.named_uniforms: k / GRID, k from 1 to GRID - 1, 1 twice as often as the others


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the range of one uniform, or of the noise of one position."""

    volume: Fraction  # its probability
    points: tuple[Any, ...]  # a uniform, or the noise of all tokens, for each entry of INSIDE
    edges: tuple[Fraction, ...] = ()  # both ends of an interval of uniforms, else none


Axis = Sequence[Region]
UNREAD: Axis = (Region(Fraction(1), tuple(map(float, INSIDE)), (Fraction(0), Fraction(1))),)


def regions(cuts: Iterable[Fraction], low: Fraction = Fraction(0), high: Fraction = Fraction(1)) -> Axis:
    """Divide the range of a uniform between low and high at the cuts inside it."""
    edges = sorted({low, high, *(cut for cut in cuts if low < cut < high)})
    return [
        Region(
            (end - start) / (high - low), tuple(float(start + (end - start) * part) for part in INSIDE), (start, end)
        )
        for start, end in pairwise(edges)
    ]


def edges_of(axes: Iterable[Axis]) -> list[Fraction]:
    """List the edges of all regions of several uniforms."""
    return [edge for axis in axes for region in axis for edge in region.edges]


def with_zero(axis: Axis, mass: Fraction) -> Axis:
    """Add a region for a uniform that is exactly 0 with probability `mass`."""
    zero = Region(mass, (0.0,) * len(INSIDE))
    return [zero, *(Region(region.volume * (1 - mass), region.points, region.edges) for region in axis)]


def cdf_cuts(weights: Sequence[Fraction]) -> list[Fraction]:
    """List the breakpoints of a token's draw by inverse CDF."""
    total = sum(weights)
    return [edge / total for edge in accumulate(weights)]


def grid_cost(axis: Axis) -> Fraction:
    """Bound the total variation between regions of a uniform on the grid and a continuous one.

    A point of the grid that is an edge may belong to either side.
    """
    return sum((_most_error(*region.edges) for region in axis if region.edges), Fraction(0)) / 2


def _most_error(low: Fraction, high: Fraction) -> Fraction:
    first = math.floor(low * GRID) + 1
    last = math.ceil(high * GRID) - 1
    inside = max(0, min(last, GRID - 1) - max(first, 1) + 1) + (first <= 1 <= last)
    at_edges = sum(edge * GRID == int(edge * GRID) and 0 < edge < 1 for edge in (low, high))
    return max(abs(Fraction(mass, GRID) - (high - low)) for mass in (inside, inside + at_edges))
