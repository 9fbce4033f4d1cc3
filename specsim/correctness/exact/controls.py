"""Negative controls: rules and uses of uniforms that were once taken for right, of which certificates show how wrong.

Small wrong functions, called by nothing else. Each names where it was met.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import torch

from specsim.correctness import wrong_rules
from specsim.correctness.exact import breakpoints as cuts
from specsim.correctness.exact import implementations as columns
from specsim.correctness.exact import race
from specsim.correctness.exact.cases import CHAIN, GIVEN_TREE, LANES, ONE, PAPER
from specsim.correctness.exact.distribution import ExactLaw, exact_law
from specsim.correctness.exact.model import Case, Draw, residual
from specsim.correctness.exact.regions import ANY, Axis, cdf_cuts, cells, with_zero
from specsim.correctness.exact.two_rounds import two_rounds
from specsim.correctness.exact.verifier import VERIFIERS, Accept, Accepted, Axes, Given, Last, Verifier, inverse_cdf

ZERO = Fraction(1, 2**24)  # how often 24 random bits are all 0
_BY_NAME = {verifier.name: verifier for verifier in VERIFIERS}
TARGET_ONLY, REJECTION, BLOCK, MULTI_ROUND = map(
    _BY_NAME.__getitem__, ("target_only", "rejection", "block", "multi_round")
)


def at_least(given: Given, uniforms: Sequence, final: float) -> Accepted:
    """A chain draft is accepted if p(x) ≥ q(x), without a uniform."""
    return wrong_rules.at_least(given.tree, given.prob_NV, given.draft_prob_NV, uniforms, final)


def uniform_twice(given: Given, uniforms: Sequence, final: float) -> Accepted:
    """Rejection whose final uniform is the last uniform that was read."""
    path, _ = REJECTION.accept(given, uniforms, 0.5)
    return REJECTION.accept(given, uniforms, uniforms[min(len(path), len(uniforms)) - 1])


def _axes_uniform_twice(draw: Draw) -> list[Axis]:
    axes = []
    for node, axis in enumerate(cuts.uniforms_rejection(draw)):
        ends = [node, node + 1] if node + 2 == len(draw.parents) else [node]
        draws = [cut for end in ends for cut in cdf_cuts(cuts.bonus_rejection(draw, end))]
        axes.append(cells([*draws, *(cell.edges[0] for cell in axis)]))
    return axes


def sibling_uniform(given: Given, uniforms: Sequence, final: float) -> Accepted:
    """Multi-round verification in which siblings share the first one's uniform, as in target-only sampling."""
    shared = [uniforms[given.tree.next_token[parent]] if parent >= 0 else 0.5 for parent in given.tree.parents]
    return MULTI_ROUND.accept(given, shared, final)


def _axes_sibling_uniform(draw: Draw) -> list[Axis]:
    own, axes = cuts.uniforms_multi_round(draw), [ANY] * len(draw.parents)
    for node in range(len(draw.parents)):
        if children := draw.children(node):
            axes[children[0]] = cells(cell.edges[0] for child in children for cell in own[child])
    return axes


def shared_noise(given: Given, uniforms: Sequence, final: float) -> Accepted:
    """Rejection of one draft whose recovery is the argmax with the noise that drew the draft (vllm#54282)."""
    from specsim.reference.acceptance import residual

    uniform, noise_V = uniforms[0], torch.tensor(uniforms[1], dtype=torch.float64)
    path, bonus = REJECTION.accept(given, [uniform], final)
    if len(path) > 1:
        return path, bonus
    weight_V = residual(given.prob_NV[0], given.draft_prob_NV[0])
    return path, int((weight_V.log() + noise_V).argmax())


def _axes_shared_noise(draw: Draw) -> list[Axis]:
    weights = residual(draw.target_NV[0], draw.draft_NV[0])
    law = tuple(weight / sum(weights) for weight in weights)
    return [*cuts.uniforms_rejection(draw), race.position(law, draw.draft_NV[0], draw.tokens[1])]


def _last_shared_noise(draw: Draw, node: int) -> Axis:
    return inverse_cdf(cuts.bonus_rejection)(draw, node) if node else ANY


def _axes_zero(draw: Draw) -> list[Axis]:
    """24 random bits without a clamp (sglang#35771)."""
    return [with_zero(axis, ZERO) for axis in TARGET_ONLY.axes(draw)]


def _unread(draw: Draw, node: int) -> Axis:
    return ANY


def _taken(verifier: Verifier, case: Case) -> "Control":
    return Control(verifier.name, case, partial(exact_law, verifier, case, columns.reference(verifier)))


def _wrong(name: str, case: Case, axes: Axes, last: Last, accept: Accept) -> "Control":
    return _taken(Verifier(name, "wrong", "", axes, last, accept), case)


@dataclass(frozen=True, slots=True)
class Control:
    """Something wrong, and the case on which its law shows it."""

    name: str
    case: Case
    law: Callable[[], ExactLaw]


CONTROLS = (
    _wrong("accept if target ≥ draft", CHAIN, lambda draw: [], inverse_cdf(cuts.bonus_rejection), at_least),
    _wrong("the uniform is used twice", PAPER, _axes_uniform_twice, _unread, uniform_twice),
    _wrong("noise shared by draft and recovery", ONE, _axes_shared_noise, _last_shared_noise, shared_noise),
    _wrong(
        "siblings share a uniform", LANES, _axes_sibling_uniform, inverse_cdf(cuts.bonus_multi_round), sibling_uniform
    ),
    _taken(replace(TARGET_ONLY, name="a uniform may be 0", axes=_axes_zero), GIVEN_TREE),
    Control("draws named by position alone", PAPER, partial(two_rounds, BLOCK, PAPER, True)),
)
