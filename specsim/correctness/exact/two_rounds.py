"""A control over two rounds: draws named by the position of a draft alone, without the round that makes them.

Block verification looks at all drafts before it chooses how many to accept. A round that accepts none has looked at the
second draft, which the next round draws again from the same noise and reads the same uniform for.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from specsim.correctness.exact.distribution import ExactLaw
from specsim.correctness.exact.model import Case, Draw, Text, draws
from specsim.correctness.exact.regions import Axis, Cell, cells
from specsim.correctness.exact.verifier import Given, Verifier


@dataclass(frozen=True, slots=True)
class Held:
    """What a round's first draws are known to be: tokens of its drafts, and cells of their uniforms."""

    tokens: tuple[int, ...] = ()
    uniforms: tuple[Cell, ...] = ()


def two_rounds(verifier: Verifier, case: Case, is_named_by_position: bool) -> ExactLaw:
    """The law of S + 1 tokens of a chain where a second round follows if the first accepts no draft.

    The models know no context. is_named_by_position: else the second round's draws are its own.
    """
    drafted = [(draw, Given.of(draw)) for draw in draws(case)]
    emitted, accepted, regions = defaultdict(Fraction), Fraction(0), 0
    for text, volume, made in _round(verifier, drafted, Held()):
        accepted += volume * (len(text) - 1)
        held = Held(made.tokens[1:], made.uniforms[1:]) if is_named_by_position else Held()
        later = _round(verifier, drafted, held) if len(text) == 1 else [((), Fraction(1), None)]
        for more, share, _ in later:
            emitted[text + more] += volume * share
            regions += 1
    law, length = case.target(()), case.num_steps + 1
    text_probs = defaultdict(Fraction)
    for text, volume in emitted.items():
        for rest in itertools.product(range(len(law)), repeat=max(0, length - len(text))):
            text_probs[(*text, *rest)[:length]] += volume * math.prod((law[token] for token in rest), start=Fraction(1))
    return ExactLaw(dict(text_probs), accepted, regions, Fraction(0))


def _round(
    verifier: Verifier, drafted: Sequence[tuple[Draw, Given]], held: Held
) -> Iterator[tuple[Text, Fraction, Held]]:
    """(tokens, probability, its draws) of every region of a round of which these draws are known."""
    known = len(held.tokens)
    for draw, given in drafted:
        if draw.tokens[1 : known + 1] != held.tokens:
            continue
        fresh = zip(draw.tokens[known + 1 :], draw.draft_NV[known:], strict=False)
        drawn = math.prod((law[token] for token, law in fresh), start=Fraction(1))
        axes = verifier.axes(draw)
        within = [_within(axis, cell) for axis, cell in zip(axes, held.uniforms, strict=False)]
        for part in itertools.product(*within, *axes[len(within) :]):
            uniforms = [cell.points[1] for cell in part]
            end = verifier.accept(given, uniforms, 0.5)[0][-1]
            for last in verifier.last(draw, end):
                path, bonus = verifier.accept(given, uniforms, last.points[1])
                volume = math.prod((cell.volume for cell in (*part, last)), start=drawn)
                yield (*draw.text(path[-1]), bonus), volume, Held(draw.tokens[1:], part)


def _within(axis: Axis, cell: Cell) -> Axis:
    """The cells of a uniform that lies within another's cell."""
    return cells([edge for each in axis for edge in each.edges], *cell.edges)
