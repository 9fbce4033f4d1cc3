"""Rates of rounds that propose every draft, from counters that also cover rounds with fewer drafts."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple


class FullRounds(NamedTuple):
    """Acceptance of the rounds that propose every draft."""

    rates: tuple[float, ...]  # share of them that accept at least 1, 2, ... drafts
    low: float  # least accept length that the counters allow, bonus included
    high: float  # largest one


def full_rounds(rates: Sequence[float], mean_drafts: float) -> FullRounds:
    """Derive the acceptance of full rounds from unconditional rates u_i over all rounds and their mean drafts.

    The number of drafts is taken to be independent of the text, as where a server chooses it by load. If a share n_i
    of the rounds proposes draft i, then n_1 = 1, the n_i sum to mean_drafts, and the rates are r_i = u_i / n_i. With
    N = n_2 + ... + n_K, the sum of r_2 to r_K is at least (Σ √u_i)² / N (Cauchy-Schwarz) and at most
    (K - 1) · Σ u_i / N, because neither n_i nor r_i rises (Chebyshev's sum inequality). Counters say no more than that;
    the rates returned have n_i as equal as they can be.
    """
    first, *later = rates
    proposals = mean_drafts - 1
    if not later or proposals <= 0:
        return FullRounds((first,), 1 + first, 1 + first)
    high = min(len(later) * sum(later) / proposals, len(later) * first)
    low = min(sum(map(sqrt, later)) ** 2 / proposals, high)
    full = [first]
    for index, rate in enumerate(later):
        share = max(proposals / (len(later) - index), rate / full[-1] if rate else 0.0)
        full.append(min(rate / share, full[-1]) if rate else 0.0)
        proposals = max(proposals - share, 0.0)
    return FullRounds(tuple(full), 1 + first + low, 1 + first + high)
