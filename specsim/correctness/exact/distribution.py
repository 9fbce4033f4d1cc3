"""The exact law of a round's tokens: every drafted tree, every cell of its uniforms, one outcome each."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from specsim.correctness.exact.model import Case, Draw, Text, draws, text_prob, texts
from specsim.correctness.exact.regions import Axis, Cell, cdf_cuts, cells, grid_cost
from specsim.correctness.exact.verifier import Accepted, Verifier


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of a verifier: the index of the drafted tree, its uniforms or noise, and the final uniform."""

    draw: int
    uniforms: tuple
    final: float


Column = Callable[[Sequence[Draw], Sequence[Trial]], list[Accepted]]


class NotConstant(Exception):
    """Two points of a cell, on which nothing should change, have different outcomes."""


@dataclass(frozen=True, slots=True)
class ExactLaw:
    """What a round does, in fractions.

    text_probs: of the round's tokens, the target's own tokens after them up to S + 1. accepted: expected accepted
    drafts. regions: in which the outcome was taken. grid: at most what uniforms on the grid of 24 bits change, in total
    variation, those that draw the drafts included.
    """

    text_probs: dict[Text, Fraction]
    accepted: Fraction
    regions: int
    grid: Fraction

    def total_variation(self, case: Case) -> Fraction:
        """From the target's law of S + 1 tokens."""
        length = case.num_steps + 1
        pairs = ((self.text_probs.get(text, 0), text_prob(case.target, text)) for text in _texts(case, length))
        return sum((abs(ours - theirs) for ours, theirs in pairs), Fraction(0)) / 2

    def impossible(self, case: Case) -> Fraction:
        """The probability of texts that the target never writes."""
        return sum((prob for text, prob in self.text_probs.items() if not text_prob(case.target, text)), Fraction(0))


def _texts(case: Case, length: int) -> list[Text]:
    return texts(case.target.vocab_size, length)


def exact_law(verifier: Verifier, case: Case, column: Column) -> ExactLaw:
    """The law of a case. NotConstant where an outcome changes within a cell."""
    drafted = list(draws(case))
    found = regions(verifier, drafted, column)
    outcomes = iter(column(drafted, [trial for region in found for trial in region.trials]))
    emitted, accepted = defaultdict(Fraction), Fraction(0)
    for region in found:
        path, bonus = _one(region, list(itertools.islice(outcomes, len(region.trials))))
        emitted[(*drafted[region.draw].text(path[-1]), bonus)] += region.volume
        accepted += region.volume * (len(path) - 1)
    text_probs = defaultdict(Fraction)
    for tokens, volume in emitted.items():
        for rest in _texts(case, case.num_steps + 1 - len(tokens)):
            text_probs[(*tokens, *rest)] += volume * text_prob(case.target, (*tokens, *rest), len(tokens))
    grid = _grid(verifier, drafted, case.tokens is None and not verifier.is_coupled)
    return ExactLaw(dict(text_probs), accepted, len(found), grid)


@dataclass(frozen=True, slots=True)
class Region:
    """A drafted tree and a cell of all its uniforms: its probability, the path, and calls at several points."""

    draw: int
    volume: Fraction
    path: list[int]
    trials: tuple[Trial, ...]


def regions(verifier: Verifier, drafted: Sequence[Draw], column: Column) -> list[Region]:
    """The final uniform's cells are those of the node where the path ends, which one call says for each cell of
    uniforms.
    """
    parts = [(index, part) for index, draw in enumerate(drafted) for part in itertools.product(*verifier.axes(draw))]
    walks = column(drafted, [Trial(index, tuple(cell.points[0] for cell in part), 0.5) for index, part in parts])
    return [
        _region(index, drafted[index], (*part, last), path)
        for (index, part), (path, _) in zip(parts, walks, strict=True)
        for last in verifier.last(drafted[index], path[-1])
    ]


def _region(index: int, draw: Draw, part: Sequence[Cell], path: list[int]) -> Region:
    points = zip(*(cell.points for cell in part), strict=True)
    trials = tuple(Trial(index, point[:-1], point[-1]) for point in points)
    return Region(index, math.prod((cell.volume for cell in part), start=draw.prob), path, trials)


def _one(region: Region, outcomes: list[Accepted]) -> Accepted:
    """The outcome of a region, at all its points and where the final uniform was another."""
    if any(outcome != outcomes[0] for outcome in outcomes) or outcomes[0][0] != region.path:
        found = " and ".join(sorted({str(outcome) for outcome in outcomes}))
        raise NotConstant(f"{found} in one region, {region.path} with another final uniform")
    return outcomes[0]


def _grid(verifier: Verifier, drafted: Sequence[Draw], is_drawn: bool) -> Fraction:
    """The cost of the grid over all drafted trees: of accept uniforms, of the final uniform at the node where it is
    greatest, and of the uniforms that draw the drafts.
    """
    total = Fraction(0)
    for draw in drafted:
        last = max(grid_cost(verifier.last(draw, node)) for node in range(len(draw.parents)))
        axes = [*verifier.axes(draw), *(_draws(draw) if is_drawn else ())]
        total += draw.prob * (sum(map(grid_cost, axes), Fraction(0)) + last)
    return total


def _draws(draw: Draw) -> Iterator[Axis]:
    """The uniform of every draft, by inverse CDF of the drafter's law at its parent."""
    return (cells(cdf_cuts(draw.draft_NV[parent])) for parent in draw.parents[1:])
