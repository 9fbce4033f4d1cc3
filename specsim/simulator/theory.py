"""Closed forms of speculative decoding where every draft is accepted with the same probability (arXiv 2211.17192)."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean tokens of a round of gamma drafts, the bonus included: 1 + α + … + α^γ."""
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))


def speedup(alpha: float, gamma: int, cost_ratio: float) -> float:
    """Speed-up over plain decoding, if a draft costs `cost_ratio` of a target's forward and verifying is free."""
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + 1)


def operations(alpha: float, gamma: int, cost_ratio: float = 0.0) -> float:
    """Arithmetic per token over plain decoding's; here `cost_ratio` is one of operations."""
    return (gamma * cost_ratio + gamma + 1) / expected_tokens(alpha, gamma)
