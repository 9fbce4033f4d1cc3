"""Verifiers with the breakpoints of their uniforms and the weights of their bonus tokens, derived in papers/.

uniforms_*: regions of every uniform that the verifier may read on a drafted tree, in reading order. bonus_*: weights of
the token after a path that ends at a node.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from specsim.correctness.exact.cases import Distribution, Draw, residual
from specsim.correctness.exact.verifier import UNREAD, Axis, Verifier, inverse_cdf, no_uniforms, of_kind, regions


def uniforms_target_only(draw: Draw, threshold_acc: Fraction) -> list[Axis]:
    """Divide one uniform per depth at the cumulative probabilities of a node's children, over threshold_acc."""
    depth = max(map(draw.depth, range(len(draw.parents))))
    cuts = [set() for _ in range(depth)]
    for node in range(len(draw.parents)):
        probs = [draw.target_NV[node][draw.tokens[child]] for child in draw.children(node)]
        if probs:
            cuts[draw.depth(node)] |= {mass / threshold_acc for mass in accumulate(probs)}
    return [regions(depth_cuts) for depth_cuts in cuts]


def bonus_target_only(draw: Draw, node: int) -> Distribution:
    """Take p without the children, or p itself where nothing is left."""
    child_tokens = {draw.tokens[child] for child in draw.children(node)}
    target_V = draw.target_NV[node]
    weights = tuple(Fraction(0) if token in child_tokens else prob for token, prob in enumerate(target_V))
    return weights if any(weights) else target_V


def bonus_whole(draw: Draw, node: int) -> Distribution:
    """Take the target's distribution p."""
    return draw.target_NV[node]


def uniforms_rejection(draw: Draw) -> list[Axis]:
    """Divide one uniform per draft at p(x) / q(x)."""
    return _of_every_draft(draw, [regions([ratio]) for ratio in _ratios(draw)])


def bonus_rejection(draw: Draw, node: int) -> Distribution:
    """Take relu(p - q), and p after the last draft that may be accepted."""
    target_V = draw.target_NV[node]
    return residual(target_V, draw.draft_NV[node]) if draw.children(node) else target_V


def uniforms_block(draw: Draw) -> list[Axis]:
    """Divide one uniform per draft of a chain at h, the share of the prefix's probability that ends there."""
    return uniforms_traversal(draw)[1:]


def _of_every_draft(draw: Draw, axes: list[Axis]) -> list[Axis]:
    """Complete a chain's axes: uniforms of drafts that max_len cuts off are not read."""
    return [*axes, *[UNREAD] * (len(draw.parents) - 1 - len(axes))]


def uniforms_traversal(draw: Draw) -> list[Axis]:
    """Divide one uniform per node at its weight w after the rejection of its children."""
    ends = _ends(draw)
    return [regions([ends[node].weight]) if node and node in ends else UNREAD for node in range(len(draw.parents))]


def bonus_traversal(draw: Draw, node: int) -> Distribution:
    """Take relu(w p - q) after the rejection of all children, and p where there is none."""
    return _ends(draw)[node].prob_V


class _RejectedNode(NamedTuple):
    """A node whose children are all rejected."""

    weight: Fraction  # probability that the path to it is accepted
    prob_V: Distribution  # of the bonus token


def _ends(draw: Draw) -> dict[int, _RejectedNode]:
    """Compute the ends of all nodes that may be accepted, parents first."""
    ends = {}
    weights = {0: Fraction(1)}  # before the rejections
    for node, weight in ((node, weights[node]) for node in draw.ends):
        prob_V = draw.target_NV[node]
        for child in draw.children(node):
            token = draw.tokens[child]
            draft_V = draw.draft_NV[node]
            weights[child] = min(Fraction(1), weight * prob_V[token] / draft_V[token])
            rest_V = tuple(max(weight * p - q, Fraction(0)) for p, q in zip(prob_V, draft_V, strict=True))
            mass = sum(rest_V, Fraction(0))
            prob_V = tuple(rest / mass for rest in rest_V) if mass else prob_V
            weight = mass / (mass + 1 - weight) if mass else Fraction(0)
        ends[node] = _RejectedNode(weight, prob_V)
    return ends


def _ratios(draw: Draw) -> list[Fraction]:
    """Compute p(x) / q(x) of every draft of a chain that may be accepted."""
    pairs = zip(draw.tokens[1 : draw.depth_limit + 1], draw.target_NV, draw.draft_NV, strict=False)
    return [target_V[token] / draft_V[token] for token, target_V, draft_V in pairs]


def uniforms_multi_round(draw: Draw) -> list[Axis]:
    """Divide one uniform per node at p(x) over q(x), both after the rejection of its elder siblings."""
    axes = [UNREAD] * len(draw.parents)
    for node in range(len(draw.parents)):
        for child, residual_V in zip(draw.children(node), _residuals(draw, node), strict=False):
            if not draw.is_repeated(child):
                token = draw.tokens[child]
                axes[child] = regions([residual_V[token] / draw.proposal(child)[token]])
    return axes


def bonus_multi_round(draw: Draw, node: int) -> Distribution:
    """Take the residual of p after the rejection of all children."""
    return list(_residuals(draw, node))[-1]


def _residuals(draw: Draw, node: int) -> Iterator[Distribution]:
    """Compute a node's residual distributions: before each of its children, and after all of them."""
    prob_V = draw.target_NV[node]
    yield prob_V
    for child in draw.children(node):
        if not draw.is_repeated(child):
            weights = residual(prob_V, draw.proposal(child))
            prob_V = tuple(weight / sum(weights) for weight in weights)
        yield prob_V


def target_only(single: Fraction, acc: Fraction) -> Verifier:
    """Describe target-only sampling under these thresholds."""
    is_lossless = single == acc == 1
    label = "" if is_lossless else f"target_only, thresholds {float(single):g}/{float(acc):g}"
    promise = "lossless" if is_lossless else "lossy"
    last = inverse_cdf(bonus_target_only)
    axes = partial(uniforms_target_only, threshold_acc=acc)
    return of_kind("target_only", axes, last, single, acc, label=label, promise=promise)


_ONE = Fraction(1)
_HALF = Fraction(1, 2)
TARGET_ONLY = target_only(_ONE, _ONE)
HALF_ACC = target_only(_ONE, _HALF)
HALF_SINGLE = target_only(_HALF, _ONE)
_OF_MEDUSA = (Fraction(9, 100), Fraction(3, 10))
TYPICAL = of_kind("typical", no_uniforms, inverse_cdf(bonus_whole), *_OF_MEDUSA)


def _typical_near(epsilon: Fraction, delta: Fraction) -> Verifier:
    """Describe typical acceptance whose thresholds decide on drafts of NEAR_TREE."""
    label = f"typical, epsilon {float(epsilon):g}, delta {float(delta):g}"
    return of_kind("typical", no_uniforms, inverse_cdf(bonus_whole), epsilon, delta, label=label)


TYPICAL_DELTA = _typical_near(Fraction(1, 4), Fraction(3, 4))  # some pass by delta; one has epsilon, and does not
TYPICAL_EPSILON = _typical_near(Fraction(1, 8), _ONE)  # some pass by epsilon
REJECTION = of_kind("rejection", uniforms_rejection, inverse_cdf(bonus_rejection))
BLOCK = of_kind("block", uniforms_block, inverse_cdf(bonus_traversal))
TRAVERSAL = of_kind("traversal", uniforms_traversal, inverse_cdf(bonus_traversal))
MULTI_ROUND = of_kind("multi_round", uniforms_multi_round, inverse_cdf(bonus_multi_round))
RECURSIVE = of_kind("recursive", uniforms_multi_round, inverse_cdf(bonus_multi_round))
