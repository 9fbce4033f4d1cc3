"""Drafts of the oracle from S modules of multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

All modules run over the whole sequence, so that every row has true tokens where they are known. Boundary `stale` keeps
rows from earlier rounds, which the oracle does not have.
"""

from types import SimpleNamespace
from typing import Any

import torch

from specsim.core.errors import InputError
from specsim.reference.oracle_distributions import ranked
from specsim.reference.oracle_draft import (
    DraftNode,
    Row,
    draft_distribution,
    draft_lanes,
    draft_topk,
    drawn,
    is_dropped,
)
from specsim.reference.oracle_forward import target_forward
from specsim.reference.oracle_layer import layer
from specsim.reference.oracle_parts import linear, norm
from specsim.reference.oracle_request import OracleRequest


def draft_mtp(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow the candidates below the root: of one module in each step, or of several that all run once."""
    if request.draft_config.num_modules == 1:
        return draft_lanes(request, tokens, root, _row)
    return _product(request, tokens, root)


def _row(request: OracleRequest, tokens: list[int], features_LF: torch.Tensor, rows: tuple[Row, ...]) -> Any:
    """Run the only module over the rows so far."""
    if is_dropped(request, features_LF, rows):
        return None
    token_ids = [*tokens[1:], *(token for token, _ in rows)]
    hidden_RH = torch.cat([features_LF, *(hidden[None] for _, hidden in rows)])
    hidden = mtp_forward(request, 0, token_ids, hidden_RH)[-1]
    return hidden, request.draft_head @ hidden


def _product(request: OracleRequest, tokens: list[int], root: DraftNode) -> list[DraftNode]:
    """Give every lane the same K children, those of its depth.

    Module k reads tokens 1+k..L and the first lane's drafts 1..k.
    """
    config = request.config
    drafter = request.drafter
    if drafter.config.boundary == "stale":
        raise InputError("boundary", "stale", "rewrite: the oracle keeps no rows from earlier rounds")
    _, target_LH = target_forward(request.target.config, request.target.tensors, tokens[:-1], ())
    hidden_LH = target_LH
    drafted: list[int] = []
    pool: list[DraftNode] = []
    lanes = [root]
    for module in range(config.num_steps):
        hidden_LH = mtp_forward(request, module, [*tokens, *drafted][1 + module :], hidden_LH)
        logits = request.draft_head @ hidden_LH[-1]
        child_ids, own_scores_K, draft_prob_V = drafts(request, drafter, logits, len(tokens) - 1, module)
        drafted.append(child_ids[0])
        source = DraftNode((), None, 0, 0.0, draft_prob_V, hidden_LH[-1], ())
        level = children(request, lanes, child_ids, own_scores_K, source)
        lanes = best_lanes(request, level)
        pool += level
        hidden_LH = hidden_LH if drafter.config.hidden_chain else target_LH
    return pool


def mtp_forward(pair: Any, module: int, token_ids: list[int], hidden_RH: torch.Tensor) -> torch.Tensor:
    """Run a module of multi-token prediction over rows (token, hidden): hidden states after its norm, [R, H].

    DeepSeek-V3, arXiv 2412.19437, section 2.2, with a layer of any kind.
    """
    config = pair.drafter.config.model
    tensors = pair.drafter.tensors
    name = f"modules.{module}"
    eps = config.rms_norm_eps
    embedding_RH = norm(tensors, f"{name}.enorm", pair.target.tensors["model.embed_tokens.weight"][token_ids], eps)
    both = torch.cat([embedding_RH, norm(tensors, f"{name}.hnorm", hidden_RH, eps)], dim=-1)
    hidden_RH = linear(tensors, f"{name}.eh_proj", both)
    normed_RH = norm(tensors, f"{name}.input_layernorm", hidden_RH, eps)
    hidden_RH, _ = layer(config, module, tensors, name, hidden_RH, normed_RH)
    return norm(tensors, f"{name}.norm", hidden_RH, eps)


def children(
    request: OracleRequest, lanes: list[DraftNode], child_ids: list[int], own_scores_K: torch.Tensor, source: DraftNode
) -> list[DraftNode]:
    """Give every lane the same K children; a sampled lane below the root goes on with its own draft.

    source: a node with the hidden state and the distribution that the children came from.
    """
    config = request.config
    level = []
    for lane, parent in enumerate(lanes):
        product_K = parent.score * own_scores_K if config.score == "prob" else parent.score + own_scores_K
        scores = product_K.clamp(max=parent.score).tolist()
        has_one = config.is_sampled and parent.path
        for index in [lane] if has_one else range(config.topk):
            path = (*parent.path, child_ids[index])
            level.append(DraftNode(path, parent, index, scores[index], source.draft_prob_V, source.hidden, ()))
    return level


def best_lanes(request: OracleRequest, level: list[DraftNode]) -> list[DraftNode]:
    """Choose the lanes of the next level: the K best nodes, or all of a sampled one."""
    if request.config.is_sampled:
        return level
    return [level[i] for i in ranked(torch.tensor([child.score for child in level]))[: request.config.topk]]


def drafts(
    request: OracleRequest, drafter: SimpleNamespace, logits: torch.Tensor, root_len: int, depth: int
) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
    """Draft K tokens from a row's logits: (ids, scores f32 [K], distribution q of drawn ones)."""
    config = request.config
    if not request.draws_drafts:
        return *draft_topk(drafter, logits, config.topk, config.score), None
    draft_prob_V = draft_distribution(request, drafter, logits)
    ids = drawn(request, draft_prob_V, root_len, depth, range(config.topk))
    prob_K = draft_prob_V[ids].float()
    return ids, prob_K if config.score == "prob" else prob_K.log(), draft_prob_V
