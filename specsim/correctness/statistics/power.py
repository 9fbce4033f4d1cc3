"""Power of a test: the distance from the right distribution that it would detect."""

from dataclasses import replace

import numpy as np

from specsim.correctness.statistics.e_value import Sample, ln_e_value

DRAWS = 16
STEPS = 8
SURELY = 2.33  # standard deviations above which a normal variable lies with probability 0.01


def detectable_distance(sample: Sample, bound: float, seed: int = 0) -> float:
    """Estimate the least total variation, averaged over contexts, that is detected with probability 0.99.

    Tokens are redrawn, in the same contexts, from mixtures of their distribution with one that has twice the
    probability of every second token and none of the others. At the same distance, hardly any alternative is harder to
    detect for chi-square. bound: the p-value below which a distribution is rejected. NaN where even the full
    alternative is not detected.
    """
    generator = np.random.default_rng(seed)
    wrong_nV = _halved(sample.prob_nV)
    if not _is_detected(sample, wrong_nV, bound, generator):
        return float("nan")
    least = 0.0
    most = 1.0
    for _ in range(STEPS):
        share = (least + most) / 2
        if _is_detected(sample, (1 - share) * sample.prob_nV + share * wrong_nV, bound, generator):
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


def _is_detected(sample: Sample, mixed_nV: np.ndarray, bound: float, generator: np.random.Generator) -> bool:
    """Whether the e-values of 99 % of samples, taken as normal, are large enough."""
    cdf_nV = mixed_nV.cumsum(1)
    ln_e_values = []
    for _ in range(DRAWS):
        uniforms = generator.random(len(sample)) * cdf_nV[:, -1]
        ln_e_values.append(ln_e_value(replace(sample, token=(cdf_nV > uniforms[:, None]).argmax(1))))
    return bool(np.mean(ln_e_values) - SURELY * np.std(ln_e_values) >= -np.log(bound))
