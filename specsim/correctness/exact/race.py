"""Gumbel-max coupling in fractions: two argmaxes of the same noise win a race (papers/gumbel-coupling).

With E = exp(-noise), which is exponential, argmax(log p + noise) is argmin(E / p). The tokens that win under p and
under q depend only on ratios of the E, and the probability of each pair of winners is a fraction.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from specsim.correctness.exact.cases import Distribution, Draw
from specsim.correctness.exact.verifier import INSIDE, Axis, Region, of_kind
from specsim.correctness.exact.verifier import unread as unread_final

_SCALES = (0.125, 1.0, 7.0)  # a race ends the same way at any speed


def position(target_V: Distribution, draft_V: Distribution, draft: int) -> Axis:
    """Divide the noise of a position with that draft: one region for every token that the target may take there."""
    winners = [_Winners(target_V, draft_V, token, draft) for token, prob in enumerate(target_V) if prob]
    return [Region(prob / draft_V[draft], winner.points) for winner in winners if (prob := winner.prob)]


def undrafted(target_V: Distribution) -> Axis:
    """Divide the noise of a position without a draft."""
    winners = [_Winners(target_V, target_V, token, token) for token, prob in enumerate(target_V) if prob]
    return [Region(winner.prob, winner.points) for winner in winners]


def unread(axis: Axis) -> Axis:
    """Make one region: the noise decides only the draft, which is given."""
    return [replace(axis[0], volume=Fraction(1))]


class _Piece(NamedTuple):
    """An interval of t = E_token / E_draft on which f(t) is linear."""

    start: Fraction
    end: Fraction | None  # None: infinite

    def inside(self, part: Fraction) -> Fraction:
        """Interpolate the t at that share of the interval."""
        return self.start + (part / (1 - part) if self.end is None else part * (self.end - self.start))


@dataclass(frozen=True, slots=True)
class _Winners:
    """One possible result of a race."""

    target_V: Distribution
    draft_V: Distribution
    token: int  # winner under target_V
    draft: int  # winner under draft_V

    @property
    def prob(self) -> Fraction:
        """Compute the probability of these two winners.

        Equal winners: 1 / Σ_k max(p_k / p_token, q_k / q_token). Otherwise, with t = E_token / E_draft, it is the
        integral of 1 / f(t)² over the t that let both win, where f(t) = t + 1 + Σ_k max(t p_k / p_token, q_k / q_draft)
        over the others.
        """
        if self.token == self.draft:
            pairs = zip(self.target_V, self.draft_V, strict=True)
            ratios = (max(p / self.target_V[self.token], q / self.draft_V[self.token]) for p, q in pairs)
            return 1 / sum(ratios, Fraction(0))
        return sum(map(self._integral, self._pieces), Fraction(0))

    @property
    def points(self) -> tuple[tuple[float, ...], ...]:
        """Give noise with these winners: E_draft = 1, E_token = t, all others a little or much later than both."""
        if self.token == self.draft:
            ratios = [Fraction(1)] * len(INSIDE)
        else:
            pieces = self._pieces
            spread = (pieces[0], pieces[len(pieces) // 2], pieces[-1])
            ratios = [piece.inside(part) for piece, part in zip(spread, INSIDE, strict=True)]
        tokens = range(len(self.target_V))
        return tuple(
            tuple(-math.log(scale * self._time(other, ratio, part)) for other in tokens)
            for ratio, part, scale in zip(ratios, INSIDE, _SCALES, strict=True)
        )

    def _integral(self, piece: _Piece) -> Fraction:
        """Integrate 1 / f² over a piece."""
        at_start = self._f(piece.start)
        if piece.end is None:
            return 1 / ((self._f(piece.start + 1) - at_start) * at_start)
        return (piece.end - piece.start) / (at_start * self._f(piece.end))

    @property
    def _pieces(self) -> list[_Piece]:
        """List the linear pieces of f; none where the two tokens cannot both win."""
        low = self.draft_V[self.token] / self.draft_V[self.draft]
        high = self.target_V[self.token] / self.target_V[self.draft] if self.target_V[self.draft] else None
        if high is not None and low >= high:
            return []
        turns = {
            self.draft_V[other] / self.draft_V[self.draft] * self.target_V[self.token] / self.target_V[other]
            for other in self._others
            if self.target_V[other]
        }
        inside = sorted(turn for turn in turns if low < turn and (high is None or turn < high))
        return [_Piece(*ends) for ends in zip([low, *inside], [*inside, high], strict=True)]

    def _f(self, ratio: Fraction) -> Fraction:
        return ratio + 1 + sum((self._latest(other, ratio) for other in self._others), Fraction(0))

    @property
    def _others(self) -> list[int]:
        return [other for other in range(len(self.target_V)) if other not in (self.token, self.draft)]

    def _latest(self, other: int, ratio: Fraction) -> Fraction:
        """Compute the E at which another token draws level with one of the winners."""
        return max(
            ratio * self.target_V[other] / self.target_V[self.token], self.draft_V[other] / self.draft_V[self.draft]
        )

    def _time(self, other: int, ratio: Fraction, part: Fraction) -> Fraction:
        if other == self.token:
            return ratio
        if other == self.draft:
            return Fraction(1)
        return self._latest(other, ratio) * (1 + part) or Fraction(1)


def _axes(draw: Draw) -> list[Axis]:
    drafted = zip(draw.target_NV, draw.draft_NV, draw.tokens[1:], strict=False)
    axes = [*(position(*arguments) for arguments in drafted), undrafted(draw.target_NV[-1])]
    num_read = draw.depth_limit + 1
    return [*axes[:num_read], *map(unread, axes[num_read:])]


GUMBEL = of_kind("gumbel", _axes, unread_final)
