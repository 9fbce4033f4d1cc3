"""Exact distribution of a round's tokens: every drafted tree, every region of its uniforms, one outcome each."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from specsim.correctness.exact.cases import Draw, ExactCase, Text, draws, text_prob, texts
from specsim.correctness.exact.verifier import Accepted, Axis, Region, Verifier, cdf_cuts, grid_cost, regions


@dataclass(frozen=True, slots=True)
class VerifierCall:
    """One call of a verifier."""

    draw: int  # index of the drafted tree
    uniforms: tuple[Any, ...]  # a uniform, or one position's noise, for each axis of the verifier
    final: float  # uniform of the bonus token


Implementation = Callable[[Sequence[Draw], Sequence[VerifierCall]], list[Accepted]]


class NotConstant(Exception):
    """Two points of a region have different outcomes, although nothing may change within it."""


class TooDeep(Exception):
    """A path continues where max_len ends it."""


@dataclass(frozen=True, slots=True)
class ExactDistribution:
    """Exact result of a round, in fractions."""

    text_probs: dict[Text, Fraction]  # of the round's tokens, continued by the target's own up to S + 1
    accepted: Fraction  # expected accepted drafts
    regions: int  # number of joint regions in which the outcome was taken
    grid: Fraction  # bound on the total variation added by uniforms of 24 bits, those that draw drafts included

    @classmethod
    def of_round(cls, case: ExactCase, emitted: Mapping[Text, Fraction], num_regions: int, grid: Fraction) -> Self:
        """Continue the texts that a round emits, given with their probabilities, by the target's own tokens."""
        text_probs = defaultdict(Fraction)
        for tokens, prob in emitted.items():
            for rest in texts(case.target.vocab_size, case.num_steps + 1 - len(tokens)):
                text_probs[(*tokens, *rest)] += prob * text_prob(case.target, (*tokens, *rest), len(tokens))
        accepted = sum((prob * (len(tokens) - 1) for tokens, prob in emitted.items()), Fraction(0))
        return cls(dict(text_probs), accepted, num_regions, grid)

    def total_variation(self, case: ExactCase) -> Fraction:
        """Compute the total variation from the target's distribution of S + 1 tokens."""
        all_texts = texts(case.target.vocab_size, case.num_steps + 1)
        differences = (abs(self.text_probs.get(text, 0) - text_prob(case.target, text)) for text in all_texts)
        return sum(differences, Fraction(0)) / 2

    def impossible(self, case: ExactCase) -> Fraction:
        """Compute the probability of texts that the target never writes."""
        return sum((prob for text, prob in self.text_probs.items() if not text_prob(case.target, text)), Fraction(0))


def exact_distribution(verifier: Verifier, case: ExactCase, implementation: Implementation) -> ExactDistribution:
    """Enumerate a case.

    NotConstant where an outcome changes within a region, TooDeep where max_len is exceeded.
    """
    drafted = list(draws(case))
    joint = joint_regions(verifier, drafted, implementation)
    outcomes = iter(implementation(drafted, [trial for region in joint for trial in region.trials]))
    emitted = defaultdict(Fraction)
    for region in joint:
        path, bonus = _one_outcome(region, list(itertools.islice(outcomes, len(region.trials))))
        emitted[(*drafted[region.draw].text(path[-1]), bonus)] += region.volume
    grid = _grid(verifier, drafted, case.tokens is None and not verifier.is_coupled)
    return ExactDistribution.of_round(case, emitted, len(joint), grid)


@dataclass(frozen=True, slots=True)
class JointRegion:
    """A drafted tree and a region of each of its uniforms."""

    draw: int  # index of the drafted tree
    volume: Fraction  # its probability
    path: list[int]  # accepted nodes
    trials: tuple[VerifierCall, ...]  # calls at several of its points


def joint_regions(verifier: Verifier, drafted: Sequence[Draw], implementation: Implementation) -> list[JointRegion]:
    """List all products of regions.

    The final uniform's regions depend on the node where the path ends. One call finds that node for each product of the
    other uniforms' regions.
    """
    parts = [(index, part) for index, draw in enumerate(drafted) for part in itertools.product(*verifier.axes(draw))]
    trials = [VerifierCall(index, tuple(region.points[0] for region in part), 0.5) for index, part in parts]
    joint = []
    for (index, part), (path, _) in zip(parts, implementation(drafted, trials), strict=True):
        draw = drafted[index]
        if path[-1] not in draw.ends:
            raise TooDeep(f"a path of {len(path) - 1} drafts; max_len allows {draw.depth_limit}")
        joint += (_joint_region(index, draw, (*part, last), path) for last in verifier.last(draw, path[-1]))
    return joint


def _joint_region(index: int, draw: Draw, part: Sequence[Region], path: list[int]) -> JointRegion:
    points = zip(*(region.points for region in part), strict=True)
    trials = tuple(VerifierCall(index, point[:-1], point[-1]) for point in points)
    return JointRegion(index, math.prod((region.volume for region in part), start=draw.prob), path, trials)


def _one_outcome(region: JointRegion, outcomes: list[Accepted]) -> Accepted:
    """Return the outcome at all points of a region, whose path may not depend on the final uniform."""
    path, bonus = outcomes[0]
    if any(outcome != outcomes[0] for outcome in outcomes) or path != region.path:
        listed = " and ".join(sorted({str(outcome) for outcome in outcomes}))
        raise NotConstant(f"{listed} in one region; with another final uniform {region.path}")
    return path, bonus


def _grid(verifier: Verifier, drafted: Sequence[Draw], is_drawn: bool) -> Fraction:
    """Sum the errors of uniforms of 24 bits over all drafted trees.

    They are those of the accept uniforms, of the final uniform at the node where it is greatest, and of the uniforms
    that draw the drafts.
    """
    total = Fraction(0)
    for draw in drafted:
        last = max(grid_cost(verifier.last(draw, node)) for node in draw.ends)
        axes = [*verifier.axes(draw), *(draft_axes(draw) if is_drawn else ())]
        total += draw.prob * (sum(map(grid_cost, axes), Fraction(0)) + last)
    return total


def draft_axes(draw: Draw) -> Iterator[Axis]:
    """Divide every draft's uniform: inverse CDF of the distribution that it is drawn from."""
    return (regions(cdf_cuts(draw.proposal(node))) for node in range(1, len(draw.parents)))
