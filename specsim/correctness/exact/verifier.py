"""What is certified: a verifier's name, what it promises, where its outcome may change, and how it is called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from specsim.correctness.exact import breakpoints as cuts
from specsim.correctness.exact import race
from specsim.correctness.exact.model import Draw, Law
from specsim.correctness.exact.regions import ANY, Axis, cdf_cuts, cells

Accepted = tuple[list[int], int]
Axes = Callable[[Draw], list[Axis]]
Last = Callable[[Draw, int], Axis]
EPSILON, DELTA = 0.09, 0.3  # Medusa's own


def rows(laws: Sequence[Law]) -> torch.Tensor:
    """Laws as f64 [N, V]."""
    return torch.tensor([list(map(float, law)) for law in laws], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Given:
    """A drafted tree as the reference column takes it."""

    tree: Any
    prob_NV: torch.Tensor
    draft_prob_NV: torch.Tensor

    @classmethod
    def of(cls, draw: Draw) -> "Given":
        from specsim.reference.acceptance import Tree
        from specsim.reference.tree import links

        parents = list(draw.parents)
        tree = Tree(list(draw.tokens), parents, *links(parents), len(parents))
        return cls(tree, *(rows(laws) for laws in (draw.target_NV, draw.draft_NV)))


Accept = Callable[[Given, Sequence, float], Accepted]


@dataclass(frozen=True, slots=True)
class Verifier:
    """One that may be certified.

    promise: `lossless` or `lossy`, and `wrong` of a control. drafts: `given` ones, `chain`, a chain of sampled ones, or
    `siblings`, trees in which they are sampled independently. axes: of a drafted tree's uniforms or noise. last: of the
    final uniform where the path ends at a node. accept: the reference column's function. settings: of the fast column's
    SpecConfig. is_coupled: whether drafts are drawn with the target's noise, not by uniforms.
    """

    name: str
    promise: str
    drafts: str
    axes: Axes
    last: Last
    accept: Accept
    settings: dict[str, float | str] = field(default_factory=dict)
    is_coupled: bool = False

    @property
    def family(self) -> str:
        """The name without its settings."""
        return self.name.partition(",")[0]


def inverse_cdf(bonus: Callable[[Draw, int], Law]) -> Last:
    """The final uniform of a bonus with those weights."""
    return lambda draw, node: cells(cdf_cuts(bonus(draw, node)))


def _no_uniforms(draw: Draw) -> list[Axis]:
    return []


def _nothing(draw: Draw, node: int) -> Axis:
    return ANY


def _race(draw: Draw) -> list[Axis]:
    drafted = zip(draw.target_NV, draw.draft_NV, draw.tokens[1:], strict=False)
    return [*(race.position(*each) for each in drafted), race.alone(draw.target_NV[-1])]


def _greedy(given: Given, uniforms: Sequence, final: float) -> Accepted:
    from specsim.reference.acceptance import greedy

    return greedy(given.tree, given.prob_NV)


def _target_only(single: float, acc: float, given: Given, uniforms: Sequence, final: float) -> Accepted:
    from specsim.reference.acceptance import target_only

    return target_only(given.tree, given.prob_NV, uniforms, final, single, acc)


def _typical(given: Given, uniforms: Sequence, final: float) -> Accepted:
    from specsim.reference.acceptance import typical

    return typical(given.tree, given.prob_NV, EPSILON, DELTA, final)


def _sampled(name: str, given: Given, uniforms: Sequence, final: float) -> Accepted:
    from specsim.reference import acceptance

    return getattr(acceptance, name)(given.tree, given.prob_NV, given.draft_prob_NV, uniforms, final)


def _gumbel(given: Given, noise: Sequence, final: float) -> Accepted:
    from specsim.reference.acceptance import gumbel

    return gumbel(given.tree, given.prob_NV, torch.tensor(noise, dtype=torch.float64))


def target_only(single: Fraction, acc: Fraction) -> Verifier:
    """Target-only sampling under these thresholds."""
    is_lossless = single == acc == 1
    return Verifier(
        name="target_only" if is_lossless else f"target_only, thresholds {float(single):g}/{float(acc):g}",
        promise="lossless" if is_lossless else "lossy",
        drafts="given",
        axes=lambda draw: cuts.uniforms_target_only(draw, acc),
        last=inverse_cdf(cuts.bonus_target_only),
        accept=partial(_target_only, float(single), float(acc)),
        settings={"threshold_single": float(single), "threshold_acc": float(acc)},
    )


ONE, HALF = Fraction(1), Fraction(1, 2)
VERIFIERS = (
    Verifier("greedy", "lossless", "given", _no_uniforms, _nothing, _greedy),
    target_only(ONE, ONE),
    target_only(ONE, HALF),
    target_only(HALF, ONE),
    Verifier(
        "typical", "lossy", "given", _no_uniforms, inverse_cdf(cuts.bonus_whole), _typical, {"verifier": "typical"}
    ),
    *(
        Verifier(name, "lossless", "chain", axes, inverse_cdf(bonus), partial(_sampled, name), {"verifier": name})
        for name, axes, bonus in (
            ("rejection", cuts.uniforms_rejection, cuts.bonus_rejection),
            ("block", cuts.uniforms_block, cuts.bonus_block),
        )
    ),
    Verifier("gumbel", "lossless", "chain", _race, _nothing, _gumbel, {"verifier": "gumbel"}, is_coupled=True),
    Verifier(
        "multi_round",
        "lossless",
        "siblings",
        cuts.uniforms_multi_round,
        inverse_cdf(cuts.bonus_multi_round),
        partial(_sampled, "multi_round"),
        {"verifier": "multi_round"},
    ),
)
