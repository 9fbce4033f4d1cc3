"""How far from its law an engine would have to be for a test of so many tokens to notice."""

from dataclasses import replace

import numpy as np

from specsim.correctness.statistics.e_value import Sample, ln_evidence

DRAWS, STEPS = 16, 8
SURELY = 2.33  # standard deviations below the mean, of which a normal law has 0.01


def noticed(sample: Sample, bound: float, seed: int = 0) -> float:
    """The least total variation, in the mean over the sample's contexts, that is noticed with probability 0.99.

    Tokens are drawn anew, in the same contexts, from mixtures of their law with one that has twice the probability of
    every second token and none of the others: at the same distance chi-square has hardly any that is harder to tell.
    bound: the p-value below which a law is rejected. NaN where even that law is not noticed.
    """
    generator, rival_nV = np.random.default_rng(seed), _halved(sample.law_nV)
    least, most = 0.0, 1.0
    if not _is_noticed(sample, rival_nV, most, bound, generator):
        return float("nan")
    for _ in range(STEPS):
        share = (least + most) / 2
        is_seen = _is_noticed(sample, rival_nV, share, bound, generator)
        least, most = (least, share) if is_seen else (share, most)
    return most * float(np.abs(rival_nV - sample.law_nV).sum(1).mean() / 2)


def _halved(law_nV: np.ndarray) -> np.ndarray:
    """Of tokens in the order of their mass the 1st, 4th, 5th, 8th, ... are doubled."""
    order = (-law_nV).argsort(1, kind="stable")
    doubled = 2.0 * (np.arange(order.shape[1]) % 4 % 3 == 0)
    rival_nV = np.empty_like(law_nV)
    np.put_along_axis(rival_nV, order, np.take_along_axis(law_nV, order, 1) * doubled, 1)
    return rival_nV / rival_nV.sum(1, keepdims=True)


def _is_noticed(
    sample: Sample, rival_nV: np.ndarray, share: float, bound: float, generator: np.random.Generator
) -> bool:
    """Whether the evidence of all but a hundredth of samples, taken for normal, is enough."""
    cdf_nV = ((1 - share) * sample.law_nV + share * rival_nV).cumsum(1)
    found = []
    for _ in range(DRAWS):
        uniforms = generator.random(len(sample)) * cdf_nV[:, -1]
        found.append(ln_evidence(replace(sample, token=(cdf_nV > uniforms[:, None]).argmax(1))))
    return bool(np.mean(found) - SURELY * np.std(found) >= -np.log(bound))
