"""Negative controls: wrong rules and wrong uses of uniforms that were once believed right.

Small wrong functions that nothing else calls. Each names the place where it was found.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from specsim.core.verifiers import KIND_OF, VERIFIER_OF, Drafts, resolve
from specsim.correctness import wrong_rules
from specsim.correctness.exact import implementations, race
from specsim.correctness.exact.breakpoints import BLOCK
from specsim.correctness.exact.cases import CHAIN, GIVEN_TREE, LANES, ONE, PAPER, Draw, ExactCase, Text, draws, residual
from specsim.correctness.exact.distribution import ExactDistribution, exact_distribution
from specsim.correctness.exact.verifier import (
    UNREAD,
    Accept,
    Accepted,
    Axes,
    Axis,
    DraftedTree,
    Last,
    Region,
    Verifier,
    edges_of,
    no_uniforms,
    regions,
    unread,
    with_zero,
)

ZERO = Fraction(1, 2**24)  # probability that 24 random bits are all 0


@dataclass(frozen=True, slots=True)
class Held:
    """First draws of a round that are known before it."""

    tokens: tuple[int, ...] = ()  # tokens of its first drafts
    uniforms: tuple[Region, ...] = ()  # regions of their uniforms


def two_rounds(verifier: Verifier, case: ExactCase, is_named_by_position: bool) -> ExactDistribution:
    """Enumerate S + 1 tokens of a chain where a second round follows if the first accepts no draft.

    The models know no context. is_named_by_position: if false, the second round's draws are its own.
    """
    drafted = [(draw, DraftedTree.of(draw)) for draw in draws(case)]
    emitted = defaultdict(Fraction)
    accepted = Fraction(0)
    num_regions = 0
    for text, volume, draws_of_round in _round(verifier, drafted, Held()):
        accepted += volume * (len(text) - 1)
        held = Held(draws_of_round.tokens[1:], draws_of_round.uniforms[1:]) if is_named_by_position else Held()
        later = _round(verifier, drafted, held) if len(text) == 1 else [((), Fraction(1), None)]
        for more, share, _ in later:
            emitted[(*text, *more)[: case.num_steps + 1]] += volume * share
            num_regions += 1
    distribution = ExactDistribution.of_round(case, emitted, num_regions, Fraction(0))
    return replace(distribution, accepted=accepted)


def _round(
    verifier: Verifier, drafted: Sequence[tuple[Draw, DraftedTree]], held: Held
) -> Iterator[tuple[Text, Fraction, Held]]:
    """Yield (tokens, probability, draws) of every region of a round, given its first draws."""
    num_held = len(held.tokens)
    for draw, drafted_tree in drafted:
        if draw.tokens[1 : num_held + 1] != held.tokens:
            continue
        fresh = zip(draw.tokens[num_held + 1 :], draw.draft_NV[num_held:], strict=False)
        drawn = math.prod((draft_V[token] for token, draft_V in fresh), start=Fraction(1))
        axes = verifier.axes(draw)
        known_axes = zip(axes, held.uniforms, strict=False)
        within = [regions(edges_of([axis]), *region.edges) for axis, region in known_axes]
        for part in itertools.product(*within, *axes[len(within) :]):
            uniforms = [region.points[1] for region in part]
            walked, _ = verifier.accept(drafted_tree, uniforms, 0.5)
            for last in verifier.last(draw, walked[-1]):
                path, bonus = verifier.accept(drafted_tree, uniforms, last.points[1])
                volume = math.prod((region.volume for region in (*part, last)), start=drawn)
                yield (*draw.text(path[-1]), bonus), volume, Held(draw.tokens[1:], part)


def _verifier_of(drafts: Drafts) -> Verifier:
    return resolve(KIND_OF[VERIFIER_OF[drafts]].certificates[0])


_TREES = _verifier_of("best")
_CHAINS = _verifier_of("sampled")
_SIBLINGS = _verifier_of("siblings")


def at_least(drafted_tree: DraftedTree, uniforms: Sequence[float], final: float) -> Accepted:
    """Accept a chain draft if p(x) ≥ q(x), without a uniform."""
    return wrong_rules.at_least(drafted_tree.tree, drafted_tree.prob_NV, drafted_tree.draft_prob_NV, uniforms, final)


def uniform_twice(drafted_tree: DraftedTree, uniforms: Sequence[float], _final: float) -> Accepted:
    """Apply rejection, but draw the bonus token with the last uniform that was read."""
    path, _ = _CHAINS.accept(drafted_tree, uniforms, 0.5)
    return _CHAINS.accept(drafted_tree, uniforms, uniforms[min(len(path), len(uniforms)) - 1])


def _axes_uniform_twice(draw: Draw) -> list[Axis]:
    axes = []
    for node, axis in enumerate(_CHAINS.axes(draw)):
        ends = [node, node + 1] if node + 2 == len(draw.parents) else [node]
        axes.append(regions(edges_of([axis, *(_CHAINS.last(draw, end) for end in ends)])))
    return axes


def sibling_uniform(drafted_tree: DraftedTree, uniforms: Sequence[float], final: float) -> Accepted:
    """Apply multi-round verification, but with one uniform for all siblings, as in target-only sampling."""
    tree = drafted_tree.tree
    shared = [uniforms[tree.next_token[parent]] if parent >= 0 else 0.5 for parent in tree.parents]
    return _SIBLINGS.accept(drafted_tree, shared, final)


def _axes_sibling_uniform(draw: Draw) -> list[Axis]:
    node_axes = _SIBLINGS.axes(draw)
    axes = [UNREAD] * len(draw.parents)
    for node in range(len(draw.parents)):
        if children := draw.children(node):
            axes[children[0]] = regions(edges_of(node_axes[child] for child in children))
    return axes


def shared_noise(drafted_tree: DraftedTree, uniforms: Sequence[Any], final: float) -> Accepted:
    """Reject one draft and recover by argmax over the same noise that drew the draft (vllm#54282)."""
    from specsim.reference.acceptance import residual

    uniform, noise = uniforms
    path, bonus = _CHAINS.accept(drafted_tree, [uniform], final)
    if len(path) > 1:
        return path, bonus
    weight_V = residual(drafted_tree.prob_NV[0], drafted_tree.draft_prob_NV[0])
    return path, int((weight_V.log() + torch.tensor(noise, dtype=torch.float64)).argmax())


def _axes_shared_noise(draw: Draw) -> list[Axis]:
    weights = residual(draw.target_NV[0], draw.draft_NV[0])
    residual_V = tuple(weight / sum(weights) for weight in weights)
    return [*_CHAINS.axes(draw), race.position(residual_V, draw.draft_NV[0], draw.tokens[1])]


def _last_shared_noise(draw: Draw, node: int) -> Axis:
    return _CHAINS.last(draw, node) if node else UNREAD


def _axes_zero(draw: Draw) -> list[Axis]:
    """Divide 24 random bits that may all be 0, without a clamp (sglang#35771)."""
    return [with_zero(axis, ZERO) for axis in _TREES.axes(draw)]


@dataclass(frozen=True, slots=True)
class WrongVerifier:
    """A wrong verifier, and a case on which its distribution differs."""

    name: str
    case: ExactCase
    distribution: Callable[[], ExactDistribution]


def _control(name: str, case: ExactCase, axes: Axes, last: Last, accept: Accept) -> WrongVerifier:
    verifier = Verifier(name, "wrong", "sampled", axes, last, accept)
    return WrongVerifier(name, case, partial(exact_distribution, verifier, case, implementations.reference(verifier)))


CONTROLS = (
    _control("accept if target ≥ draft", CHAIN, no_uniforms, _CHAINS.last, at_least),
    _control("the uniform is used twice", PAPER, _axes_uniform_twice, unread, uniform_twice),
    _control("noise shared by draft and recovery", ONE, _axes_shared_noise, _last_shared_noise, shared_noise),
    _control("siblings share a uniform", LANES, _axes_sibling_uniform, _SIBLINGS.last, sibling_uniform),
    _control("a uniform may be 0", GIVEN_TREE, _axes_zero, _TREES.last, _TREES.accept),
    WrongVerifier("draws named by position only", PAPER, partial(two_rounds, BLOCK, PAPER, True)),
)
