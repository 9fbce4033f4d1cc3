"""Drafts of the oracle from one block (DFlash, arXiv 2602.06036, and DSpark), without a cache.

Every layer's keys and values are those of the whole context and of the block, computed at once. The tree is grown
best-first from a heap, a node's children with it.
"""

import heapq
import math
from typing import Any

import torch

from specsim.reference.oracle_draft import DraftNode, draft_distribution, draft_topk, drawn
from specsim.reference.oracle_forward import target_forward
from specsim.reference.oracle_layer import attention_weights, feed_forward, project_heads
from specsim.reference.oracle_parts import Tensors, linear, norm
from specsim.reference.oracle_request import OracleRequest


def draft_block(request: OracleRequest, tokens: list[int], root: DraftNode, depth: int) -> list[DraftNode]:
    """Grow the candidates below the root: the best of the tree over the slots, or K sampled lanes.

    depth: of the deepest candidate, whose block is as long as that of the setting.
    """
    room = min(request.max_len - len(tokens), depth)  # depth of the deepest node that max_len allows, too
    if room <= 0:
        return []
    slots_SH = _slots(request, tokens)[:room]
    if request.config.is_sampled:
        return _lanes(request, tokens, slots_SH, root)
    return _best_first(request, tokens[-1], slots_SH, root)


def _slots(request: OracleRequest, tokens: list[int]) -> torch.Tensor:
    """Run the block after x_0..x_(L-1): hidden states of the rows that draft, after the final norm."""
    config = request.draft_config
    model = config.model
    block = config.block
    tensors = request.draft_tensors
    target = request.target
    length = len(tokens) - 1
    num_rows = min(request.config.num_steps + (block.predicts == "own"), request.max_len - length)
    _, features_LF = target_forward(target.config, target.tensors, tokens[:-1], config.feature_layers)
    context_LH = norm(tensors, "hidden_norm", linear(tensors, "fc", features_LF), model.rms_norm_eps)
    ids = [tokens[-1], *[block.mask_token] * (num_rows - 1)]
    table = "embed_tokens.weight"
    rows_RH = (tensors[table] if table in tensors else target.tensors["model.embed_tokens.weight"])[ids]
    for index in range(model.num_layers):
        name = f"layers.{index}"
        normed_RH = norm(tensors, f"{name}.input_layernorm", rows_RH, model.rms_norm_eps)
        is_causal = index in config.causal_layers
        rows_RH = rows_RH + _attention(model, index, tensors, context_LH, normed_RH, is_causal)
        rows_RH, _ = feed_forward(model, index, tensors, name, rows_RH)
    return norm(tensors, "norm", rows_RH, model.rms_norm_eps)[int(block.predicts == "own") :]


def _attention(
    model: Any, index: int, tensors: Tensors, context_LH: torch.Tensor, normed_RH: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """Attend from the block to context and block, without later rows if causal.

    Within a window, if the layer has one, and to its first columns.
    """
    shape = model.layers[index].attention
    group = shape.num_heads // shape.num_kv_heads
    name = f"layers.{index}.self_attn"
    length = len(context_LH)
    read = torch.cat([context_LH, normed_RH])
    query = project_heads(model, shape, tensors, name, "q", normed_RH, first=length)
    key, value = (
        project_heads(model, shape, tensors, name, part, read).repeat_interleave(group, dim=0) for part in "kv"
    )
    column = torch.arange(len(read))
    age = length + torch.arange(len(normed_RH))[:, None] - column
    is_unseen = (age >= (shape.window or math.inf)) & (column >= shape.first_columns)
    is_unseen |= (age < 0) & torch.tensor(is_causal)
    scores = (query @ key.mT * shape.head_dim**-0.5).masked_fill(is_unseen, -math.inf)
    attended = attention_weights(scores, tensors.get(f"{name}.sinks")) @ value
    return linear(tensors, f"{name}.o_proj", attended.transpose(0, 1).flatten(1))


def _logits(request: OracleRequest, hidden: torch.Tensor, before: int) -> torch.Tensor:
    """Compute a slot's logits [V] after a token."""
    tensors = request.draft_tensors
    if not request.draft_config.block.markov_rank:
        return request.draft_head @ hidden
    bias = linear(tensors, "markov_head.markov_w2", tensors["markov_head.markov_w1.weight"][before])
    return request.draft_head @ hidden + bias


def _is_confident(request: OracleRequest, hidden: torch.Tensor, before: int) -> bool:
    """Check the confidence head of a slot after a token."""
    block = request.draft_config.block
    if not block.threshold:
        return True
    tensors = request.draft_tensors
    if block.confidence == "hidden_and_token":
        hidden = torch.cat([hidden, tensors["markov_head.markov_w1.weight"][before]])
    logit = float(linear(tensors, "confidence_head.proj", hidden))
    return 1 / (1 + math.exp(-logit)) >= block.threshold


def _best_first(request: OracleRequest, bonus: int, slots_SH: torch.Tensor, root: DraftNode) -> list[DraftNode]:
    """Take the best nodes, each from the heap, and then put its K best children into it.

    The best node of a depth is taken first, and decides whether the next slot is confident.
    """
    config = request.config
    count = config.num_draft_tokens - 1
    waiting: list[tuple[float, tuple, DraftNode]] = []
    nodes: list[DraftNode] = []
    cut = len(slots_SH)  # depth of the last confident slot's drafts
    reached = -1

    def visit(parent: DraftNode, order: tuple) -> None:
        """Put a node's children into the heap; of equal scores the first by depth, parent and rank is the best."""
        nonlocal reached, cut
        depth = len(parent.path)
        before = parent.path[-1] if parent.path else bonus
        if depth == len(slots_SH):
            return
        if depth > reached:
            reached = depth
            cut = cut if _is_confident(request, slots_SH[depth], before) else min(cut, depth)
        ids, own_K = draft_topk(request.drafter, _logits(request, slots_SH[depth], before), config.topk, config.score)
        scores = parent.score * own_K if config.score == "prob" else parent.score + own_K
        for rank, (token, score) in enumerate(zip(ids, scores.clamp(max=parent.score).tolist(), strict=True)):
            child = DraftNode((*parent.path, token), parent, 0, score, None, None, ())
            heapq.heappush(waiting, (-score, (depth, -parent.score, order, rank), child))

    visit(root, ())
    while waiting and len([node for node in nodes if len(node.path) <= cut]) < count:
        _, order, node = heapq.heappop(waiting)
        nodes.append(node)
        visit(node, order)
    while reached < cut - 1:  # a slot that no node of the tree needed may yet be the cut
        _, order, node = heapq.heappop(waiting)
        visit(node, order)
    return _in_order(root, [node for node in nodes if len(node.path) <= cut])


def _in_order(root: DraftNode, nodes: list[DraftNode]) -> list[DraftNode]:
    """Sort nodes as engines number them: by depth, then by their parents' scores, then by their own."""
    ordered: list[DraftNode] = []
    parents = [root]
    while parents:
        level = [node for parent in parents for node in nodes if node.parent is parent]
        ordered += level
        parents = sorted(level, key=lambda node: -node.score)
    return ordered


def _lanes(request: OracleRequest, tokens: list[int], slots_SH: torch.Tensor, root: DraftNode) -> list[DraftNode]:
    """Draw K lanes, whose first one decides whether the next slot is confident.

    At temperature 0 the lanes are the K best children of the root, each with the best token after it.
    """
    config = request.config
    pool: list[DraftNode] = []
    parents = [root]
    for depth, slot_H in enumerate(slots_SH):
        if not _is_confident(request, slot_H, [*tokens, *parents[0].path][-1]):
            break
        level = []
        for lane in range(config.topk):
            parent = parents[lane if depth else 0]
            logits = _logits(request, slot_H, [*tokens, *parent.path][-1])
            draft_prob_V = None
            if request.draws_drafts:
                draft_prob_V = draft_distribution(request, request.drafter, logits)
                token = drawn(request, draft_prob_V, len(tokens) - 1, depth, range(lane + 1))[lane]
                prob = draft_prob_V[token].float()
                token_score = prob if config.score == "prob" else prob.log()
            else:
                ids, scores_K = draft_topk(request.drafter, logits, 1 if depth else config.topk, config.score)
                token, token_score = (ids[0], scores_K[0]) if depth else (ids[lane], scores_K[lane])
            score = parent.score * token_score if config.score == "prob" else parent.score + token_score
            score = float(score.clamp(max=parent.score))
            level.append(DraftNode((*parent.path, token), parent, lane, score, draft_prob_V, None, ()))
        pool += level
        parents = level
    return pool
