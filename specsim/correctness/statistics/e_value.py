"""E-values against the hypothesis that tokens follow known distributions: rarely large for a correct engine.

Let tokens x_1, x_2, ... have known distributions p_t given all that came before. Choose another distribution before x_t
is drawn, and divide the probability that it gives the tokens by that of p. The ratio has mean 1, because each factor
has, given the past. So has any mean of such ratios (Robbins, Ann. Math. Statist. 41, 1970). By Markov's inequality it
reaches 1/a with a probability of at most a. This is exact for any number of tokens, however rare a cell is and in
whatever order contexts occur; the tail of chi-square, which is also shown, is a limit. The alternatives to p are:

- in each context a distribution drawn around p (Dirichlet of weight · p). The ratio is the Dirichlet-multinomial
distribution over the multinomial one. Its logarithm is near half of the amount by which G² exceeds its degrees of
freedom;
- p with the odds of some marked tokens changed, such as those that the drafter rates higher than the target does, and
those that the text holds already; or p at another temperature, where the mark is ln p.

The first kind is applied to all tokens, and to those that begin a round, which is known before they are drawn. Later
tokens of a round are not tested separately: their existence depends on the drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp
from scipy.stats import chi2

WEIGHTS = (30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4)
ODDS = (-0.6, -0.3, -0.15, -0.07, -0.03, 0.03, 0.07, 0.15, 0.3, 0.6)
LEAST_EXPECTED = 5.0
DRAWS = 16
STEPS = 8
SURELY = 2.33  # standard deviations above which a normal variable lies with probability 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """n tokens and the contexts before them."""

    token: np.ndarray  # i64 [n]
    prob_nV: np.ndarray  # f64 [n, V], distribution of each token given all tokens before it
    distribution_ids: np.ndarray  # i64 [n], equal where the distributions are equal
    past_ids: np.ndarray  # i64 [n], equal where the tokens that decide the distribution are equal
    is_first: np.ndarray  # bool [n], whether it begins a round other than its request's first
    marks: np.ndarray  # bool or f64 [M, n, V], sets of tokens whose odds may be wrong, or their shares in an exponent

    def __len__(self) -> int:
        return len(self.token)


class ChiSquare(NamedTuple):
    """Pearson's statistic."""

    statistic: float
    degrees_of_freedom: int
    p_value: float  # in the limit of many tokens


def ln_e_value(sample: Sample, normalizers_MO: np.ndarray | None = None) -> float:
    """Compute the natural logarithm of the e-value, the mean of all ratios.

    It is infinite if a token has probability 0. normalizers_MO: of the sample's contexts, which are computed if None.
    """
    if (_of_tokens(sample, sample.prob_nV) == 0).any():
        return np.inf
    everywhere = np.ones(len(sample), dtype=bool)
    around = [
        value
        for contexts in (sample.distribution_ids, sample.past_ids)
        for selected in (everywhere, sample.is_first)
        for value in _around(*_counts(sample, contexts, selected))
    ]
    marked_M = [float(_of_tokens(sample, marked_nV).sum()) for marked_nV in sample.marks]
    tilted_MO = np.outer(marked_M, ODDS) - (_normalizers(sample) if normalizers_MO is None else normalizers_MO)
    return float(logsumexp([_ln_mean(around), _ln_mean(tilted_MO.ravel())]) - np.log(2))


def chi_square(sample: Sample) -> ChiSquare:
    """Compute chi-square over contexts of equal distribution.

    Cells that expect fewer than 5 tokens are merged within their context, and dropped where all of them together expect
    fewer.
    """
    count_GV, prob_GV = _counts(sample, sample.distribution_ids, np.ones(len(sample), dtype=bool))
    statistic = 0.0
    freedom = 0
    for count_V, expected_V in zip(count_GV, count_GV.sum(1, keepdims=True) * prob_GV, strict=True):
        large = expected_V >= LEAST_EXPECTED
        count = np.append(count_V[large], count_V[~large].sum())
        expected = np.append(expected_V[large], expected_V[~large].sum())
        is_large = expected >= LEAST_EXPECTED
        statistic += float(((count[is_large] - expected[is_large]) ** 2 / expected[is_large]).sum())
        freedom += int(is_large.sum()) - (not expected[~is_large].any())
    return ChiSquare(statistic, freedom, float(chi2.sf(statistic, freedom)) if freedom else 1.0)


def _of_tokens(sample: Sample, of_nV: np.ndarray) -> np.ndarray:
    return of_nV[np.arange(len(sample)), sample.token]


def _counts(sample: Sample, contexts: np.ndarray, selected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the kept tokens by context, with the contexts' distributions [G, V]."""
    _, first, context = np.unique(contexts[selected], return_index=True, return_inverse=True)
    vocab = sample.prob_nV.shape[1]
    counts = np.bincount(context * vocab + sample.token[selected], minlength=len(first) * vocab)
    return counts.reshape(-1, vocab), sample.prob_nV[selected][first]


def _around(count_GV: np.ndarray, prob_GV: np.ndarray) -> list[float]:
    """Compute ln of Dirichlet-multinomial over multinomial, for every weight."""
    occurs = count_GV > 0
    count = count_GV[occurs]
    prob = prob_GV[occurs]
    total = count_GV.sum(1)
    values = []
    for weight in WEIGHTS:
        shift = gammaln(weight * prob + count) - gammaln(weight * prob) - count * np.log(prob)
        values.append(float(shift.sum() + (gammaln(weight) - gammaln(weight + total)).sum()))
    return values


def _normalizers(sample: Sample) -> np.ndarray:
    """Compute ln of the sum of p · exp(θ · mark) over all tokens, f64 [M, O] for every mark and θ."""
    exponents = [[odds * marked_nV for odds in ODDS] for marked_nV in sample.marks]
    return np.array([[np.log((sample.prob_nV * np.exp(x_nV)).sum(1)).sum() for x_nV in row] for row in exponents])


def _ln_mean(values: Sequence[float] | np.ndarray) -> float:
    return float(logsumexp(values) - np.log(len(values)))


def detectable_distance(sample: Sample, bound: float) -> float:
    """Estimate the least total variation, averaged over contexts, that is detected with probability 0.99.

    Tokens are redrawn, in the same contexts, from mixtures of their distribution with one that has twice the
    probability of every second token and none of the others. At the same distance, hardly any alternative is harder to
    detect for chi-square. bound: the p-value below which a distribution is rejected. NaN where even the full
    alternative is not detected.
    """
    generator = np.random.default_rng(0)
    wrong_nV = _halved(sample.prob_nV)
    normalizers_MO = _normalizers(sample)

    def is_detected(share: float) -> bool:
        """Whether the e-values of 99 % of samples, taken as normal, are large enough."""
        cdf_nV = ((1 - share) * sample.prob_nV + share * wrong_nV).cumsum(1)
        ln_e_values = []
        for _ in range(DRAWS):
            uniforms = generator.random(len(sample)) * cdf_nV[:, -1]
            redrawn = replace(sample, token=(cdf_nV > uniforms[:, None]).argmax(1))
            ln_e_values.append(ln_e_value(redrawn, normalizers_MO))
        return bool(np.mean(ln_e_values) - SURELY * np.std(ln_e_values) >= -np.log(bound))

    least, most = 0.0, 1.0
    if not is_detected(most):
        return float("nan")
    for _ in range(STEPS):
        share = (least + most) / 2
        if is_detected(share):
            most = share
        else:
            least = share
    return most * float(np.abs(wrong_nV - sample.prob_nV).sum(1).mean() / 2)


def _halved(prob_nV: np.ndarray) -> np.ndarray:
    """Double the 1st, 4th, 5th, 8th, ... tokens in the order of their mass, and drop the others."""
    order = (-prob_nV).argsort(1, kind="stable")
    factors = 2.0 * (np.arange(order.shape[1]) % 4 % 3 == 0)
    wrong_nV = np.empty_like(prob_nV)
    np.put_along_axis(wrong_nV, order, np.take_along_axis(prob_nV, order, 1) * factors, 1)
    return wrong_nV / wrong_nV.sum(1, keepdims=True)
