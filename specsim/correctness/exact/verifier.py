"""Values of certified verifiers: name, promise, the reference's function, and regions of the uniforms, in fractions.

A region lies between breakpoints of a uniform; a verifier has one outcome on each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from specsim.core.verifiers import KIND_OF, Drafts, resolve
from specsim.correctness.exact.cases import Distribution, Draw

if TYPE_CHECKING:
    from specsim.core.rule import Tree

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


Accepted = tuple[list[int], int]  # path of accepted nodes from the root, bonus token
Axes = Callable[[Draw], list[Axis]]
Last = Callable[[Draw, int], Axis]


def rows(distributions: Sequence[Distribution]) -> torch.Tensor:
    """Stack distributions to f64 [N, V]."""
    return torch.tensor([list(map(float, prob_V)) for prob_V in distributions], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """A drafted tree in the reference's form."""

    tree: "Tree"
    prob_NV: torch.Tensor  # f64 [N, V], target's distribution after every node
    draft_prob_NV: torch.Tensor  # f64 [N, V], drafter's distribution after every node

    @classmethod
    def of(cls, draw: Draw) -> "DraftedTree":
        from specsim.core.rule import Tree
        from specsim.reference.tree import links

        parents = list(draw.living_parents)
        tree = Tree(list(draw.tokens), parents, *links(parents), draw.depth_limit)
        return cls(tree, rows(draw.target_NV), rows(draw.draft_NV))


Accept = Callable[[DraftedTree, Sequence[Any], float], Accepted]


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier that may be certified, or a wrong one."""

    name: str
    promise: str  # lossless, lossy, or wrong (a control)
    drafts: Drafts  # of core.verifiers, best ones being given
    axes: Axes  # regions of a drafted tree's uniforms or noise
    last: Last  # regions of the final uniform where the path ends at a node
    accept: Accept  # the reference implementation's function
    settings: dict[str, Any] = field(default_factory=dict)  # SpecConfig of the fast implementation
    is_coupled: bool = False  # whether drafts are drawn with the target's noise instead of uniforms

    @property
    def family(self) -> str:
        """The name without its settings."""
        return self.name.partition(",")[0]


def inverse_cdf(bonus: Callable[[Draw, int], Distribution]) -> Last:
    """Divide the final uniform of a bonus token with those weights."""
    return lambda draw, node: regions(cdf_cuts(bonus(draw, node)))


def no_uniforms(_draw: Draw) -> list[Axis]:
    """Return no axis: the verifier reads no accept uniform."""
    return []


def unread(_draw: Draw, _node: int) -> Axis:
    """Return one region: the final uniform is not read."""
    return UNREAD


def of_kind(name: str, axes: Axes, last: Last, *thresholds: Fraction, label: str = "", promise: str = "") -> Verifier:
    """Describe a verifier by its record, under thresholds; label and promise: unless they are the record's."""
    kind = KIND_OF[name]
    values = [float(value) for value in thresholds]

    def accept(drafted_tree: DraftedTree, uniforms: Sequence[Any], final: float) -> Accepted:
        distributions = [drafted_tree.prob_NV] + [drafted_tree.draft_prob_NV] * kind.reads_draft_prob
        draws: tuple[Any, ...] = (final,) if kind.draws == "none" else (uniforms, final)
        if kind.is_coupled:
            draws = (torch.tensor(uniforms, dtype=torch.float64),)
        return resolve(kind.reference)(drafted_tree.tree, *distributions, *draws, *values)

    return Verifier(
        name=label or name,
        promise=promise or ("lossless" if kind.is_lossless else "lossy"),
        drafts=kind.drafts,
        axes=axes,
        last=last,
        accept=accept,
        settings={"verifier": name, **dict(zip(kind.thresholds, values, strict=True))},
        is_coupled=kind.is_coupled,
    )
