"""Evidence that tokens do not follow their laws, as a number that a right engine rarely makes large.

Let tokens x_1, x_2, ... have known laws p_t given all that came before. The probability that another law, chosen before
x_t is seen, gave to the tokens, divided by the one that p gave them, has the mean 1: each factor does, given the past.
So has any mean of such ratios (Robbins, Ann. Math. Statist. 41, 1970), and by Markov's inequality it reaches 1/a with a
probability of at most a. This is exact for any number of tokens, however rare a cell is and in whatever order contexts
are met; chi-square's tail, which is shown beside it, is that of a limit. The rivals of p are:

- in each context a law drawn around p (Dirichlet of weight · p): the ratio is that of the Dirichlet-multinomial law to
  the multinomial one, and its logarithm near half of what G² exceeds its degrees of freedom by;
- p with the odds of some marked tokens changed: those that the drafter likes better than the target does, and those
  that the text holds already.

The first kind is taken of all tokens, and of those that begin a round, which is known before they are. Later tokens of
a round are not taken alone: that there are any says something of the drafts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp
from scipy.stats import chi2

WEIGHTS = (30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4)
ODDS = (-0.6, -0.3, -0.15, -0.07, -0.03, 0.03, 0.07, 0.15, 0.3, 0.6)
LEAST_EXPECTED = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """n tokens, and what came before each.

    token: i64 [n]. law_nV: f64, its law given all tokens before. laws, pasts: i64 [n], contexts by number: equal where
    the laws are equal, equal where the tokens that decide the law are. is_first: bool [n], the first of its round, not
    of its request. marks: bool [M, n, V].
    """

    token: np.ndarray
    law_nV: np.ndarray
    laws: np.ndarray
    pasts: np.ndarray
    is_first: np.ndarray
    marks: np.ndarray

    def __len__(self) -> int:
        return len(self.token)


class ChiSquare(NamedTuple):
    """Pearson's statistic; p_value: that of the limit of many tokens."""

    statistic: float
    degrees_of_freedom: int
    p_value: float


def ln_evidence(sample: Sample) -> float:
    """Natural logarithm of the mean of all ratios; infinite if a token has no probability."""
    if (_of_tokens(sample, sample.law_nV) == 0).any():
        return np.inf
    everywhere = np.ones(len(sample), dtype=bool)
    around = [
        value
        for contexts in (sample.laws, sample.pasts)
        for kept in (everywhere, sample.is_first)
        for value in _around(*_cells(sample, contexts, kept))
    ]
    tilted = [value for marked_nV in sample.marks for value in _tilted(sample, marked_nV)]
    return float(logsumexp([_ln_mean(around), _ln_mean(tilted)]) - np.log(2))


def chi_square(sample: Sample) -> ChiSquare:
    """Over contexts of equal law. Cells that expect fewer than 5 tokens are put together within their context, and left
    out where they expect fewer all the same.
    """
    count_GV, law_GV = _cells(sample, sample.laws, np.ones(len(sample), dtype=bool))
    statistic, freedom = 0.0, 0
    for count_V, expected_V in zip(count_GV, count_GV.sum(1, keepdims=True) * law_GV, strict=True):
        large = expected_V >= LEAST_EXPECTED
        count = np.append(count_V[large], count_V[~large].sum())
        expected = np.append(expected_V[large], expected_V[~large].sum())
        kept = expected >= LEAST_EXPECTED
        statistic += float(((count[kept] - expected[kept]) ** 2 / expected[kept]).sum())
        freedom += int(kept.sum()) - (not expected[~kept].any())
    return ChiSquare(statistic, freedom, float(chi2.sf(statistic, freedom)) if freedom else 1.0)


def _of_tokens(sample: Sample, of_nV: np.ndarray) -> np.ndarray:
    return of_nV[np.arange(len(sample)), sample.token]


def _cells(sample: Sample, contexts: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and laws [G, V] of the contexts in which tokens were kept."""
    _, first, place = np.unique(contexts[kept], return_index=True, return_inverse=True)
    vocab = sample.law_nV.shape[1]
    counts = np.bincount(place * vocab + sample.token[kept], minlength=len(first) * vocab)
    return counts.reshape(-1, vocab), sample.law_nV[kept][first]


def _around(count_GV: np.ndarray, law_GV: np.ndarray) -> list[float]:
    """ln of Dirichlet-multinomial over multinomial, for every weight."""
    met = count_GV > 0
    count, law, total = count_GV[met], law_GV[met], count_GV.sum(1)
    values = []
    for weight in WEIGHTS:
        shift = gammaln(weight * law + count) - gammaln(weight * law) - count * np.log(law)
        values.append(float(shift.sum() + (gammaln(weight) - gammaln(weight + total)).sum()))
    return values


def _tilted(sample: Sample, marked_nV: np.ndarray) -> list[float]:
    """ln of the ratio where marked tokens have e^θ times their odds against the others, for every θ."""
    mass, is_marked = (sample.law_nV * marked_nV).sum(1), _of_tokens(sample, marked_nV).sum()
    return [float(odds * is_marked - np.log1p(mass * np.expm1(odds)).sum()) for odds in ODDS]


def _ln_mean(values: list[float]) -> float:
    return float(logsumexp(values) - np.log(len(values)))
