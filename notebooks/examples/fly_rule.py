"""A lossy rule that engines ship, outside the package: FLy (arXiv 2511.22972), as vllm-project/vllm#53987 computes it.

Compute its exact distance from the target's distribution:

    specsim certify --module notebooks/examples/fly_rule.py:rule
"""

import math

from specsim import AcceptanceRule, Accepted
from specsim.reference.acceptance import residual
from specsim.reference.sampling import inverse_cdf

WINDOW = 1  # drafts after an overridden one that have to pass; vLLM's default is 6, more than small cases have
THRESHOLD = 0.3  # least entropy of the target at an overridden draft, in nats; vLLM's default


def fly(tree, prob_NV, draft_prob_NV, uniforms, final_uniform):
    """Accept drafts as rejection does, and also a rejected one between an unsure target and drafts that pass.

    Draft i passes if u · q(x) < p(x). One that does not is accepted if p(x) > 0, the entropy -Σ p ln p of the three
    largest p is at least THRESHOLD, and the next WINDOW drafts exist and pass. The bonus is that of rejection.
    """
    chain = tree.chain()

    def passes(node):
        token = tree.tokens[node]
        return uniforms[node - 1] * draft_prob_NV[node - 1][token] < prob_NV[node - 1][token]

    for node in chain:
        target_V = prob_NV[node - 1]
        window = range(node + 1, node + WINDOW + 1)
        if passes(node):
            continue
        is_possible = target_V[tree.tokens[node]] > 0 and window[-1] in chain
        if not (is_possible and entropy(target_V) >= THRESHOLD and all(passes(later) for later in window)):
            return Accepted(
                tree.path(node - 1), inverse_cdf(residual(target_V, draft_prob_NV[node - 1]), final_uniform)
            )
    return Accepted(tree.path(len(chain)), inverse_cdf(prob_NV[len(chain)], final_uniform))


def entropy(prob_V):
    """Sum -p ln p over the three largest probabilities."""
    largest = sorted(float(prob) for prob in prob_V.tolist())[-3:]
    return -sum(prob * math.log(prob) for prob in largest if prob > 0)


rule = AcceptanceRule("FLy", "sampled", fly, lossless=False)
