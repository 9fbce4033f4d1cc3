"""Closed forms of speculative decoding where every draft is accepted with the same probability (arXiv 2211.17192)."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a round of gamma drafts gives, the bonus included: 1 + α + … + α^γ."""
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))


def speedup(alpha: float, gamma: int, cost_ratio: float) -> float:
    """Over plain decoding, where a draft costs `cost_ratio` of a target's forward and nodes are verified for free."""
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + 1)


def operations(alpha: float, gamma: int, cost_ratio: float = 0.0) -> float:
    """Arithmetic a token, over plain decoding's; here `cost_ratio` is of operations."""
    return (gamma * cost_ratio + gamma + 1) / expected_tokens(alpha, gamma)
