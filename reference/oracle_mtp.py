"""Drafts of the oracle from S modules of multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

All modules run over the whole sequence, so that every row has true tokens where they are known. Boundary `stale` keeps
rows from earlier rounds, which the oracle does not have.
"""

from types import SimpleNamespace

import torch

from specsim.core.errors import InputError
from specsim.reference.oracle_distributions import ranked
from specsim.reference.oracle_draft import Node, draft_distribution, draft_topk, drawn
from specsim.reference.oracle_forward import mtp_forward, target_forward
from specsim.reference.oracle_request import Request


def mtp_draft(request: Request, tokens: list[int], root: Node) -> list[Node]:
    """Grow all candidates below the root: K children of every lane, the same for all lanes of a depth.

    Module k reads tokens 1+k..L and the first lane's drafts 1..k.
    """
    config = request.config
    drafter = request.drafter
    if drafter is None:
        return []
    if drafter.config.boundary == "stale":
        raise InputError("boundary", "stale", "rewrite: the oracle keeps no rows from earlier rounds")
    _, target_LH = target_forward(request.target.config, request.target.tensors, tokens[:-1], ())
    hidden_LH = target_LH
    drafted: list[int] = []
    pool: list[Node] = []
    lanes = [root]
    for module in range(config.num_steps):
        hidden_LH = mtp_forward(request, module, [*tokens, *drafted][1 + module :], hidden_LH)
        logits = request.target.tensors["lm_head.weight"] @ hidden_LH[-1]
        child_ids, own_scores_K, draft_prob_V = drafts(request, drafter, logits, len(tokens) - 1, module)
        drafted.append(child_ids[0])
        made = Node((), None, 0, 0.0, draft_prob_V, hidden_LH[-1], ())
        level = children(request, lanes, child_ids, own_scores_K, made)
        lanes = best_lanes(request, level)
        pool += level
        hidden_LH = hidden_LH if drafter.config.hidden_chain else target_LH
    return pool


def children(
    request: Request, lanes: list[Node], child_ids: list[int], own_scores_K: torch.Tensor, made: Node
) -> list[Node]:
    """Give every lane the same K children; a sampled lane below the root goes on with its own draft.

    made: a node with the hidden state and the distribution that the children came from.
    """
    config = request.config
    level = []
    for lane, parent in enumerate(lanes):
        product_K = parent.score * own_scores_K if config.score == "prob" else parent.score + own_scores_K
        scores = product_K.clamp(max=parent.score).tolist()
        has_one = config.is_sampled and parent.path
        for place in [lane] if has_one else range(config.topk):
            path = (*parent.path, child_ids[place])
            level.append(Node(path, parent, place, scores[place], made.draft_prob_V, made.hidden, ()))
    return level


def best_lanes(request: Request, level: list[Node]) -> list[Node]:
    """Choose the lanes of the next level: the K best nodes, or all of a sampled one."""
    if request.config.is_sampled:
        return level
    return [level[i] for i in ranked(torch.tensor([child.score for child in level]))[: request.config.topk]]


def drafts(
    request: Request, drafter: SimpleNamespace, logits: torch.Tensor, root_len: int, depth: int
) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
    """Draft K tokens from a row's logits: (ids, scores f32 [K], distribution q of drawn ones)."""
    config = request.config
    if not request.draws_drafts:
        return *draft_topk(drafter, logits, config.topk, config.score), None
    draft_prob_V = draft_distribution(request, drafter, logits)
    ids = [drawn(request, draft_prob_V, root_len, depth, lane) for lane in range(config.topk)]
    prob_K = draft_prob_V[ids].float()
    return ids, prob_K if config.score == "prob" else prob_K.log(), draft_prob_V
