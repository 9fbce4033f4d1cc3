"""Certified verifiers: name, promise, regions of the uniforms, and the reference's function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from specsim.correctness.exact import breakpoints, race
from specsim.correctness.exact.model import Distribution, Draw
from specsim.correctness.exact.regions import UNREAD, Axis, cdf_cuts, regions

if TYPE_CHECKING:
    from specsim.core.rule import Tree

Accepted = tuple[list[int], int]  # path of accepted nodes from the root, bonus token
Axes = Callable[[Draw], list[Axis]]
Last = Callable[[Draw, int], Axis]
EPSILON = 0.09  # Medusa's value
DELTA = 0.3


def rows(distributions: Sequence[Distribution]) -> torch.Tensor:
    """Stack distributions to f64 [N, V]."""
    return torch.tensor([list(map(float, prob_V)) for prob_V in distributions], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Given:
    """A drafted tree in the reference's form."""

    tree: "Tree"
    prob_NV: torch.Tensor  # f64 [N, V], target's distribution after every node
    draft_prob_NV: torch.Tensor  # f64 [N, V], drafter's distribution after every node

    @classmethod
    def of(cls, draw: Draw) -> "Given":
        from specsim.core.rule import Tree
        from specsim.reference.tree_layout import links

        parents = list(draw.living_parents)
        tree = Tree(list(draw.tokens), parents, *links(parents), draw.depth_limit)
        return cls(tree, rows(draw.target_NV), rows(draw.draft_NV))


Accept = Callable[[Given, Sequence[Any], float], Accepted]


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier that may be certified, or a wrong one."""

    name: str
    promise: str  # lossless, lossy, or wrong (a control)
    drafts: str  # given; chain (sampled); siblings (sampled independently at their parents)
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


def _race(draw: Draw) -> list[Axis]:
    drafted = zip(draw.target_NV, draw.draft_NV, draw.tokens[1:], strict=False)
    axes = [*(race.position(*each) for each in drafted), race.undrafted(draw.target_NV[-1])]
    num_read = draw.depth_limit + 1
    return [*axes[:num_read], *map(race.unread, axes[num_read:])]


def _reference(name: str) -> Callable[..., Accepted]:
    """Look up the reference's function when it is called."""
    from specsim.reference import acceptance

    return getattr(acceptance, name)


def target_only(single: Fraction, acc: Fraction) -> Verifier:
    """Describe target-only sampling under these thresholds."""
    is_lossless = single == acc == 1
    return Verifier(
        name="target_only" if is_lossless else f"target_only, thresholds {float(single):g}/{float(acc):g}",
        promise="lossless" if is_lossless else "lossy",
        drafts="given",
        axes=lambda draw: breakpoints.uniforms_target_only(draw, acc),
        last=inverse_cdf(breakpoints.bonus_target_only),
        accept=lambda given, uniforms, final: _reference("target_only")(
            given.tree, given.prob_NV, uniforms, final, float(single), float(acc)
        ),
        settings={"threshold_single": float(single), "threshold_acc": float(acc)},
    )


def sampled(name: str, drafts: str, axes: Axes, bonus: Callable[[Draw, int], Distribution]) -> Verifier:
    """Describe a lossless verifier of drafts that are sampled from the drafter's distributions."""

    def accept(given: Given, uniforms: Sequence[float], final: float) -> Accepted:
        return _reference(name)(given.tree, given.prob_NV, given.draft_prob_NV, uniforms, final)

    return Verifier(name, "lossless", drafts, axes, inverse_cdf(bonus), accept, {"verifier": name})


_ONE = Fraction(1)
_HALF = Fraction(1, 2)
GREEDY = Verifier(
    *("greedy", "lossless", "given", no_uniforms, unread),
    lambda given, _, __: _reference("greedy")(given.tree, given.prob_NV),
)
TARGET_ONLY = target_only(_ONE, _ONE)
TYPICAL = Verifier(
    *("typical", "lossy", "given", no_uniforms, inverse_cdf(breakpoints.bonus_whole)),
    lambda given, _, final: _reference("typical")(given.tree, given.prob_NV, EPSILON, DELTA, final),
    {"verifier": "typical"},
)
REJECTION = sampled("rejection", "chain", breakpoints.uniforms_rejection, breakpoints.bonus_rejection)
BLOCK = sampled("block", "chain", breakpoints.uniforms_block, breakpoints.bonus_block)
GUMBEL = Verifier(
    *("gumbel", "lossless", "chain", _race, unread),
    lambda given, noise, _: _reference("gumbel")(given.tree, given.prob_NV, torch.tensor(noise, dtype=torch.float64)),
    {"verifier": "gumbel"},
    is_coupled=True,
)
MULTI_ROUND = sampled("multi_round", "siblings", breakpoints.uniforms_multi_round, breakpoints.bonus_multi_round)
VERIFIERS = (
    *(GREEDY, TARGET_ONLY, target_only(_ONE, _HALF), target_only(_HALF, _ONE), TYPICAL),
    *(REJECTION, BLOCK, GUMBEL, MULTI_ROUND),
)
