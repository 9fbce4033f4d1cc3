"""Gumbel-max coupling in fractions: two argmaxes of the same noise are winners of a race (papers/gumbel-coupling).

With E = exp(-noise), which is exponential, argmax(log p + noise) is argmin(E / p). Which token wins under p and which
under q depends on ratios of the E alone, and the probability of each pair of winners is a fraction.
"""

import math
from fractions import Fraction
from itertools import pairwise

from specsim.correctness.exact.model import Law
from specsim.correctness.exact.regions import INSIDE, Axis, Cell

_SCALES = (0.125, 1.0, 7.0)  # a race ends the same way at any speed


def position(law: Law, draft_law: Law, draft: int) -> Axis:
    """The noise of a position whose draft is that token: a cell for every token that the target may take there."""
    winners = [token for token, prob in enumerate(law) if prob]
    return [_cell(law, draft_law, token, draft) for token in winners if _prob(law, draft_law, token, draft)]


def alone(law: Law) -> Axis:
    """The noise of a position without a draft."""
    return [Cell(prob, _points(law, law, token, token, [Fraction(1)] * 3)) for token, prob in enumerate(law) if prob]


def _prob(law: Law, draft_law: Law, token: int, draft: int) -> Fraction:
    """That the target takes `token` and the drafter `draft`.

    Equal: 1 / Σ_k max(p_k / p_token, q_k / q_token). Else, with t = E_token / E_draft, the integral of 1 / f(t)² over
    the t that let both win, f(t) = t + 1 + Σ_k max(t p_k / p_token, q_k / q_draft) over the others: linear in pieces.
    """
    if token == draft:
        pairs = zip(law, draft_law, strict=True)
        return 1 / sum(max(p / law[token], q / draft_law[token]) for p, q in pairs)
    total = Fraction(0)
    for start, end in pairwise(_pieces(law, draft_law, token, draft)):
        at_start = _speed(law, draft_law, token, draft, start)
        if end is None:
            slope = _speed(law, draft_law, token, draft, start + 1) - at_start
            total += 1 / (slope * at_start)
        else:
            total += (end - start) / (at_start * _speed(law, draft_law, token, draft, end))
    return total


def _pieces(law: Law, draft_law: Law, token: int, draft: int) -> list[Fraction | None]:
    """Ends of the pieces of t, None for one without end; empty where the two cannot both win."""
    low = draft_law[token] / draft_law[draft]
    high = law[token] / law[draft] if law[draft] else None
    if high is not None and low >= high:
        return []
    others = [other for other, prob in enumerate(law) if prob and other not in (token, draft)]
    turns = {draft_law[other] / draft_law[draft] * law[token] / law[other] for other in others}
    return [low, *sorted(turn for turn in turns if low < turn and (high is None or turn < high)), high]


def _speed(law: Law, draft_law: Law, token: int, draft: int, ratio: Fraction) -> Fraction:
    """f(t)."""
    rest = [other for other in range(len(law)) if other not in (token, draft)]
    return ratio + 1 + sum(max(ratio * law[k] / law[token], draft_law[k] / draft_law[draft]) for k in rest)


def _cell(law: Law, draft_law: Law, token: int, draft: int) -> Cell:
    ratios = [Fraction(1)] * 3
    if token != draft:
        pieces = list(pairwise(_pieces(law, draft_law, token, draft)))
        spread = (pieces[0], pieces[len(pieces) // 2], pieces[-1])
        ratios = [_within(*piece, part) for piece, part in zip(spread, INSIDE, strict=True)]
    volume = _prob(law, draft_law, token, draft) / draft_law[draft]
    return Cell(volume, _points(law, draft_law, token, draft, ratios))


def _within(start: Fraction, end: Fraction | None, part: Fraction) -> Fraction:
    return start + (part / (1 - part) if end is None else part * (end - start))


def _points(law: Law, draft_law: Law, token: int, draft: int, ratios: list[Fraction]) -> tuple[tuple[float, ...], ...]:
    """Noise by which token and draft win: E_draft = 1, E_token = t, all others a little or much later than both."""
    points = []
    for ratio, part, scale in zip(ratios, INSIDE, _SCALES, strict=True):
        times = []
        for other in range(len(law)):
            latest = max(ratio * law[other] / law[token], draft_law[other] / draft_law[draft])
            time = ratio if other == token else Fraction(1) if other == draft else latest * (1 + part) or Fraction(1)
            times.append(-math.log(scale * time))
        points.append(tuple(times))
    return tuple(points)
