"""An acceptance rule outside the package: K-SEQ of SpecTr (arXiv 2310.15141), and a broken variant.

Prove the rule and refute the variant:

    specsim certify --module notebooks/examples/my_rule.py:rule
    specsim certify --module notebooks/examples/my_rule.py:broken
"""

import torch

from specsim import AcceptanceRule, Accepted
from specsim.reference.sampling import inverse_cdf


def k_seq(tree, prob_NV, draft_prob_NV, uniforms, final_uniform):
    """Accept the first of k siblings x with u · k · q(x) < p(x), each sibling with its own uniform u.

    With b = min(q, p / k), a sibling is accepted with probability β = Σ b, and one of them with 1 - (1 - β)^k. The
    bonus is drawn from what that leaves of p: p - b · (1 - (1 - β)^k) / β.
    """
    path = [0]
    while siblings := list(tree.acceptable_children(path)):
        target_V, draft_V = prob_NV[path[-1]], draft_prob_NV[path[-1]]
        for child in siblings:
            token = tree.tokens[child]
            if uniforms[child] * len(siblings) * draft_V[token] < target_V[token]:
                path.append(child)
                break
        else:
            return Accepted(path, inverse_cdf(remainder(target_V, draft_V, len(siblings)), final_uniform))
    return Accepted(path, inverse_cdf(prob_NV[path[-1]], final_uniform))


def remainder(target_V, draft_V, num_siblings):
    """Remove the probability of accepted siblings from the target's."""
    accepted_V = torch.minimum(draft_V, target_V / num_siblings)
    one = accepted_V.sum()
    if one == 0:  # the drafter proposes nothing that the target could say
        return target_V
    left_V = (target_V - accepted_V * ((1 - (1 - one) ** num_siblings) / one)).clamp(min=0)
    return left_V if left_V.sum() > 0 else target_V


def k_seq_without_remainder(tree, prob_NV, draft_prob_NV, uniforms, final_uniform):
    """Walk as K-SEQ does, but draw every bonus token from p: likely drafts are then counted twice."""
    path, _ = k_seq(tree, prob_NV, draft_prob_NV, uniforms, final_uniform)
    return Accepted(path, inverse_cdf(prob_NV[path[-1]], final_uniform))


rule = AcceptanceRule("K-SEQ", "siblings", k_seq)
broken = AcceptanceRule("K-SEQ without remainder", "siblings", k_seq_without_remainder)
