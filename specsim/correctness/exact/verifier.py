"""Values of certified verifiers: name, promise, regions of the uniforms, and the reference's function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from specsim.core.kinds import resolve
from specsim.core.verifiers import KIND_OF, Drafts
from specsim.correctness.exact.model import Distribution, Draw
from specsim.correctness.exact.regions import UNREAD, Axis, cdf_cuts, regions

if TYPE_CHECKING:
    from specsim.core.rule import Tree

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
        distributions = (
            [drafted_tree.prob_NV, drafted_tree.draft_prob_NV] if kind.reads_draft_prob else [drafted_tree.prob_NV]
        )
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
