"""Closed forms of speculative decoding with one acceptance probability for every draft (arXiv 2211.17192)."""

from specsim.core.arguments import check_arguments
from specsim.core.limits import NonNegativeNumber, Probability, StepCount


@check_arguments
def expected_tokens(alpha: Probability, gamma: StepCount) -> float:
    """Compute the mean tokens of a round of gamma drafts, bonus included: 1 + α + … + α^γ."""
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))


@check_arguments
def speedup(alpha: Probability, gamma: StepCount, cost_ratio: NonNegativeNumber) -> float:
    """Compute the speed-up over plain decoding if a draft costs `cost_ratio` target forwards and verifying is free."""
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + 1)


@check_arguments
def operations(alpha: Probability, gamma: StepCount, cost_ratio: NonNegativeNumber = 0.0) -> float:
    """Compute the operations per token over plain decoding's; `cost_ratio` is a ratio of operations."""
    return (gamma * cost_ratio + gamma + 1) / expected_tokens(alpha, gamma)
