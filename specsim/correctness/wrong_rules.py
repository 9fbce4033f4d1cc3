"""Wrong acceptance rules that both exact certificates and sampling tests have to reject."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specsim.core.rule import Tree


def at_least(
    tree: "Tree", prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, _uniforms: Sequence[float], final: float
) -> tuple[list[int], int]:
    """Accept a chain draft if p(x) ≥ q(x), without a uniform (the other rule of FlashInfer's trace reference).

    prob_NV, draft_prob_NV: the target's and the drafter's distribution after every node. Returns the accepted nodes and
    the bonus token.
    """
    from specsim.reference import acceptance, sampling

    last = len(tree.chain())
    for node in tree.chain():
        token = tree.tokens[node]
        prob_V = prob_NV[node - 1]
        draft_prob_V = draft_prob_NV[node - 1]
        if prob_V[token] < draft_prob_V[token]:
            return tree.path(node - 1), sampling.inverse_cdf(acceptance.residual(prob_V, draft_prob_V), final)
    return tree.path(last), sampling.inverse_cdf(prob_NV[last], final)


def shared_uniform(
    tree: "Tree", prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms: Sequence[float], final: float
) -> tuple[list[int], int]:
    """Apply chain rejection, but decide every draft of a chain with the first uniform.

    One draft is decided correctly. In a longer chain, a small uniform that accepts the first draft accepts the later
    ones too. Arguments and result are those of at_least.
    """
    from specsim.reference import acceptance, sampling

    last = len(tree.chain())
    for node in tree.chain():
        token = tree.tokens[node]
        prob_V = prob_NV[node - 1]
        draft_prob_V = draft_prob_NV[node - 1]
        if uniforms[0] * draft_prob_V[token] >= prob_V[token]:
            return tree.path(node - 1), sampling.inverse_cdf(acceptance.residual(prob_V, draft_prob_V), final)
    return tree.path(last), sampling.inverse_cdf(prob_NV[last], final)
