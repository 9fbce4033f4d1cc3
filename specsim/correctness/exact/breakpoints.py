"""Where the outcome of each verifier can change, derived in papers/: breakpoints of its uniforms, and the bonus'
weights.

Of a drafted tree. uniforms_*: an axis for every uniform the verifier may read, in its order. bonus_*: weights of the
token after a path that ends at a node.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

from specsim.correctness.exact.model import Draw, Law, residual
from specsim.correctness.exact.regions import ANY, Axis, cells


def uniforms_target_only(draw: Draw, threshold_acc: Fraction) -> list[Axis]:
    """One uniform a depth: the probability of a node's children up to each, over threshold_acc."""
    depth = max(map(draw.depth, range(len(draw.parents))))
    cuts = [set() for _ in range(depth)]
    for node in range(len(draw.parents)):
        probs = [draw.target_NV[node][draw.tokens[child]] for child in draw.children(node)]
        if probs:
            cuts[draw.depth(node)] |= {mass / threshold_acc for mass in accumulate(probs)}
    return [cells(each) for each in cuts]


def bonus_target_only(draw: Draw, node: int) -> Law:
    """p without the children, p itself where they leave nothing."""
    taken = {draw.tokens[child] for child in draw.children(node)}
    law = draw.target_NV[node]
    weights = tuple(Fraction(0) if token in taken else prob for token, prob in enumerate(law))
    return weights if any(weights) else law


def bonus_whole(draw: Draw, node: int) -> Law:
    """p."""
    return draw.target_NV[node]


def uniforms_rejection(draw: Draw) -> list[Axis]:
    """One uniform a draft: p(x) / q(x)."""
    return [cells([ratio]) for ratio in _ratios(draw)]


def bonus_rejection(draw: Draw, node: int) -> Law:
    """relu(p - q), p after the last draft."""
    law = draw.target_NV[node]
    return residual(law, draw.draft_NV[node]) if draw.children(node) else law


def uniforms_block(draw: Draw) -> list[Axis]:
    """One uniform a draft: the share h of the prefix' probability that is to end there."""
    return [cells([share]) for _, share, _ in list(_prefixes(draw))[1:]]


def bonus_block(draw: Draw, node: int) -> Law:
    """relu(w p - q), p after the last draft."""
    _, _, weights = list(_prefixes(draw))[node]
    return weights if any(weights) else draw.target_NV[node]


def _prefixes(draw: Draw) -> Iterator[tuple[Fraction, Fraction, Law]]:
    """(w, h, weights of the bonus) of every prefix of a chain."""
    kept, ratios = Fraction(1), [Fraction(1), *_ratios(draw)]
    for node, (law, draft_law, ratio) in enumerate(zip(draw.target_NV, draw.draft_NV, ratios, strict=True)):
        kept = min(Fraction(1), kept * ratio)
        if not draw.children(node):
            yield kept, kept, law
            return
        weights = tuple(max(kept * p - q, Fraction(0)) for p, q in zip(law, draft_law, strict=True))
        mass = sum(weights)
        yield kept, (mass / (mass + 1 - kept) if mass else Fraction(0)), weights


def _ratios(draw: Draw) -> list[Fraction]:
    """p(x) / q(x) of every draft of a chain."""
    pairs = zip(draw.tokens[1:], draw.target_NV, draw.draft_NV, strict=False)
    return [law[token] / draft_law[token] for token, law, draft_law in pairs]


def uniforms_multi_round(draw: Draw) -> list[Axis]:
    """One uniform a node: what is left of p(x), its elder siblings rejected, over q(x)."""
    axes = [ANY] * len(draw.parents)
    for node in range(len(draw.parents)):
        for child, law in zip(draw.children(node), _left(draw, node), strict=False):
            token = draw.tokens[child]
            axes[child] = cells([law[token] / draw.draft_NV[node][token]])
    return axes


def bonus_multi_round(draw: Draw, node: int) -> Law:
    """What all children leave of p."""
    return list(_left(draw, node))[-1]


def _left(draw: Draw, node: int) -> Iterator[Law]:
    """What is left of a node's law before each of its children and after all of them."""
    law = draw.target_NV[node]
    yield law
    for _ in draw.children(node):
        law = residual(law, draw.draft_NV[node])
        law = tuple(prob / sum(law) for prob in law)
        yield law
