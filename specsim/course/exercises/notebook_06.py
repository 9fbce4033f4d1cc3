"""Exercises of notebook 06: verification."""

from math import ceil

import torch

from specsim.course.enumeration import inverse_cdf, with_drawn_siblings, with_given_drafts
from specsim.course.exercise import solves


# A draft is accepted if uniform lies between the sum before it and the sum with it, an interval of length p. The rest
# of the line has length 1 minus all drafts' p, and is divided like p without them. So this is one draw from the target,
# with the drafts at the front of the line.
# - `inverse_cdf(remaining,` → `inverse_cdf(target_prob,`: The last draw is from the whole target. There a draft gets a
#   second chance, so that drafts come out too often: draw from the target without them.
# - `total = total +` → `total =`: Each draft is compared with its own probability, but they share one uniform. After
#   the first draft is rejected the uniform is known to be large. Compare with the sum of the probabilities so far.
# - `final_uniform` → `uniform`: The last draw uses `uniform` again. If no draft is accepted, it is known to be large,
#   so the last tokens come out too often. Draw with `final_uniform`.
# - `False, inverse_cdf(target_prob, final_uniform)`: That is lossless, but no draft is ever accepted, so nothing is
#   gained.
@solves("06-1", ((5, 2, 1), [1, 2]), ((1, 1, 6), [0]), ((2, 3, 2, 1), [3, 0, 1]), ((4, 4), [1, 0]), ((5, 2, 1), [2]),
        observe=with_given_drafts)  # fmt: skip
def sample_with_drafts(
    drafts: list[int], target_prob: torch.Tensor, uniform: float, final_uniform: float
) -> tuple[bool, int]:
    """Draw the next token from the target: return whether it is one of the drafts, and the token.

    uniform and final_uniform are independent.
    """
    remaining = target_prob.clone()
    total = 0
    for token in drafts:
        total = total + target_prob[token]
        if uniform <= total:
            return True, token
        remaining[token] = 0
    return False, inverse_cdf(remaining, final_uniform)


# After a rejection the problem is the old one with another target: the residual distribution. So each step is lossless
# for the target that it is given, and the whole is lossless for p.
# - `< remaining[token]` → `< target_prob[token]`, `(remaining - draft_prob)` → `(target_prob - draft_prob)`: Every
#   draft is compared with the target itself. After a rejection the token must follow the residual distribution: a token
#   that was drafted often has had its share.
# - `weights / weights.sum()` → `weights if weights.sum() > 0 else remaining`: The residual weights are not divided by
#   their sum. They are too small for the comparison with the next draft, which is rejected too often; then the last
#   draw gives the wrong shares.
# - `zip(drafts, uniforms, strict=True)` → `zip(drafts, uniforms[:1] * len(drafts))`: All drafts share one uniform.
#   After a rejection it is known to be large, so the next draft is rejected too often. Here each draft needs its own.
# - `zip(drafts, uniforms, strict=True)` → `zip(drafts[:1], uniforms)`: Only the first draft is tried. That is lossless,
#   but the other siblings are of no use then.
@solves("06-2", ((5, 2, 1), (3, 1, 4), 2), ((1, 1, 6), (6, 1, 1), 2), ((2, 5, 9), (10, 4, 2), 2), ((1, 3), (3, 1), 3),
        ((5, 2, 1), (3, 1, 4), 1), observe=with_drawn_siblings)  # fmt: skip
def try_siblings(
    drafts: list[int],
    target_prob: torch.Tensor,
    draft_prob: torch.Tensor,
    uniforms: list[float],
    final_uniform: float,
) -> tuple[bool, int]:
    """Verify siblings drawn independently from draft_prob: return whether one is accepted, and the token.

    uniforms: one for each draft, independent of each other and of final_uniform.
    """
    remaining = target_prob
    for token, uniform in zip(drafts, uniforms, strict=True):
        if uniform * draft_prob[token] < remaining[token]:
            return True, token
        weights = (remaining - draft_prob).clamp(min=0)
        remaining = weights / weights.sum()
    return False, inverse_cdf(remaining, final_uniform)


# n · |wrong − p| ≥ errors · √(n · p · (1 − p)) gives n ≥ errors² · p · (1 − p) / (wrong − p)². A difference half as
# large needs four times as many tokens.
# - `ceil(errors * (prob * (1 - prob)) ** 0.5 / abs(wrong_prob - prob))`: The square is missing. The difference grows
#   with n and its error with √n, so the equation is one for √n.
# - `prob * (1 - prob)` → `prob`: The factor 1 − p is missing: the variance of the count is n · p · (1 − p).
# - `errors**2` → `errors`: The number of standard errors has to be squared as well.
@solves("06-3", (0.125, 0.135, 5.0), (0.125, 0.2, 5.0), (0.3, 0.26, 3.0), (0.9, 0.83, 4.0))
def tokens_needed(prob: float, wrong_prob: float, errors: float) -> int:
    """Compute the number of tokens after which a wrong probability is expected to be `errors` standard errors off."""
    return ceil(errors**2 * prob * (1 - prob) / (wrong_prob - prob) ** 2)
