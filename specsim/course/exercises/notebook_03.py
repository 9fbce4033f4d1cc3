"""Exercises of notebook 03: speculative sampling."""

from fractions import Fraction

import torch

from specsim.course.enumeration import inverse_cdf, with_one_draft
from specsim.course.exercise import solves

# A target and a drafter over three tokens, in eighths: ordinary, equal, opposed, and with nothing in common.
PAIRS = tuple(
    tuple([Fraction(weight, 8) for weight in row] for row in pair)
    for pair in (((5, 2, 1), (3, 1, 4)), ((2, 3, 3), (2, 3, 3)), ((1, 1, 6), (6, 1, 1)), ((0, 0, 8), (4, 4, 0)))
)


# q(x) · min(1, p(x) / q(x)) is min(q(x), p(x)). The sum over x is the overlap of the two distributions.
# - `sum(p * q for p, q in zip(target_prob, draft_prob))`: Σ p·q is the probability that two independent draws are
#   equal. The rule keeps more: where p(x) ≥ q(x) it keeps every draft x.
# - `sum(q for p, q in zip(target_prob, draft_prob) if p >= q)`: That counts only the drafts that are certain to be
#   kept. Where p(x) < q(x) a draft is still kept with probability p(x) / q(x).
# - `sum(rates := [min(1, p / q) for p, q in zip(target_prob, draft_prob) if q]) / len(rates)`: That is the mean over
#   tokens. A token that the drafter seldom proposes must count less: weight each token's probability of acceptance by
#   q(x).
@solves("03-1", *PAIRS)
def accept_rate(target_prob: list[Fraction], draft_prob: list[Fraction]) -> Fraction:
    """Compute the probability that the draft is kept, over all drafts."""
    return sum(map(min, target_prob, draft_prob), Fraction(0))


# Kept drafts give min(p, q) of the target's p. The rest is max(p - q, 0), and its sum is the probability of a
# rejection.
# - `list(target_prob)`: That is the target's own distribution. Tokens that the drafter likes too little get their
#   share, but tokens that it likes too much are given out twice: once as kept drafts and once as replacements.
# - `[weight / total for weight in weights]` → `weights`: The weights are right, but they sum to the probability of a
#   rejection. Divide by their sum, since a replacement is drawn only after a rejection.
# - `max(p - q, Fraction(0))` → `abs(p - q)`: Where q(x) > p(x) kept drafts alone give x its whole probability p(x).
#   Such a token may never be the replacement: its weight is 0.
@solves("03-2", *PAIRS)
def residual(target_prob: list[Fraction], draft_prob: list[Fraction]) -> list[Fraction]:
    """Compute the distribution of the token that replaces a rejected draft; p itself if no draft is ever rejected."""
    weights = [max(p - q, Fraction(0)) for p, q in zip(target_prob, draft_prob, strict=True)]
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(target_prob)


# The draft is kept if uniform · q(x) < p(x), which has probability min(1, p(x) / q(x)) and divides by nothing.
# - `inverse_cdf(weights, final_uniform)` → `inverse_cdf(target_prob, final_uniform)`: The replacement is drawn from the
#   whole target instead of the residual distribution, so tokens that the drafter likes come out too often.
# - `uniform * draft_prob[token] < target_prob[token]` → `draft_prob[token] <= target_prob[token]`: The uniform is not
#   used: a draft with p(x) < q(x) is never kept, and a token that the drafter likes too much never comes out.
# - `final_uniform` → `uniform`: One uniform decides twice. After a rejection it is known to be large, so the
#   replacement does not follow the residual distribution: its last tokens come out too often.
# - `False, inverse_cdf(target_prob, final_uniform)`: Every token is the target's own. That is lossless, but no draft is
#   ever kept, so nothing is gained.
@solves("03-3", ((5, 2, 1), (3, 1, 4)), ((1, 1, 6), (6, 1, 1)), ((2, 3, 3), (2, 3, 3)), ((0, 0, 8), (4, 4, 0)),
        observe=with_one_draft)  # fmt: skip
def keep_or_replace(
    token: int, target_prob: torch.Tensor, draft_prob: torch.Tensor, uniform: float, final_uniform: float
) -> tuple[bool, int]:
    """Decide one draft: return whether it is kept, and the token that the round gives.

    The distributions are tensors; uniform and final_uniform are independent.
    """
    if uniform * draft_prob[token] < target_prob[token]:
        return True, token
    weights = (target_prob - draft_prob).clamp(min=0)
    return False, inverse_cdf(weights, final_uniform)
