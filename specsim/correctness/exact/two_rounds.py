"""Control over two rounds: draws named only by the position of a draft, not by the round that makes them.

Block verification looks at all drafts before it chooses how many to accept. A round that accepts none has already
looked at the second draft. The next round draws that draft again from the same noise and with the same uniform.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from specsim.correctness.exact.distribution import ExactDistribution
from specsim.correctness.exact.model import Draw, ExactCase, Text, draws
from specsim.correctness.exact.regions import Region, edges_of, regions
from specsim.correctness.exact.verifier import DraftedTree, Verifier


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
            emitted[text + more] += volume * share
            num_regions += 1
    target_V = case.target(())
    length = case.num_steps + 1
    text_probs = defaultdict(Fraction)
    for text, volume in emitted.items():
        for rest in itertools.product(range(len(target_V)), repeat=max(0, length - len(text))):
            prob = math.prod((target_V[token] for token in rest), start=Fraction(1))
            text_probs[(*text, *rest)[:length]] += volume * prob
    return ExactDistribution(dict(text_probs), accepted, num_regions, Fraction(0))


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
