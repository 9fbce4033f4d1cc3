"""Candidates from the slots of a block: the best-first tree over them, or sampled lanes.

Slot d makes the drafts of depth d + 1. Their distribution follows from the slot's hidden state, and with a Markov head
from the token before them. A tree's node scores the product of its path's probabilities, or the sum of their logarithms
(DDTree: sgl-project/sglang#22887).
"""

from typing import NamedTuple

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, ExplicitCandidates
from specsim.reference.drafters.block_head import BlockHead
from specsim.reference.drafting import Parents, child_scores, draft, draft_topk
from specsim.reference.sampling import topk


class Slots(NamedTuple):
    """Slots of every request's block, in the order of depths."""

    hidden: torch.Tensor  # [B, S, H]
    bonus: torch.Tensor  # i64 [B], token before the first slot's drafts
    depths: torch.Tensor  # i64 [B], depth of the deepest node that max_len allows


class Level(NamedTuple):
    """Candidates of one depth, W·K of them: the children of W parents in order."""

    tokens: torch.Tensor  # i64 [B, W·K]
    parents: torch.Tensor  # i64 [B, W·K]
    scores: torch.Tensor  # f32 [B, W·K]
    logits: torch.Tensor  # [B, W, draft vocabulary], of the parents
    confidence: torch.Tensor | None  # f32 [B], from the first parent


def best_first(batch: Batch, head: BlockHead, slots: Slots, config: SpecConfig, vocab_size: int) -> ExplicitCandidates:
    """Grow the tree that holds the N-1 best nodes, where a node has its K most probable tokens as children.

    A child scores no more than its parent, so only the N-1 best nodes of a depth can have children in the tree.
    Candidates are all children of these, best parent first.
    """
    tokens_BW = slots.bonus[:, None]
    scores_BW = torch.full(tokens_BW.shape, 1.0 if config.score == "prob" else 0.0)
    index_BW = torch.full_like(tokens_BW, -1)
    levels = []
    num_made = 0
    for depth in range(config.num_steps):
        logits_BWV, confidence_B = _read(head, slots, depth, tokens_BW)
        topk_scores, topk_index = draft_topk(logits_BWV.flatten(0, 1), config.topk, head.d2t, score=config.score)
        topk_scores = topk_scores.unflatten(0, tokens_BW.shape)
        scores = child_scores(scores_BW, topk_scores, config.score).flatten(1)
        tokens = topk_index.unflatten(0, tokens_BW.shape).flatten(1)
        parents = index_BW.repeat_interleave(config.topk, dim=1)
        levels.append(Level(tokens, parents, scores, logits_BWV, confidence_B))
        chosen_BW = topk(scores, min(config.num_draft_tokens - 1, scores.shape[1]))[1]
        tokens_BW = tokens.gather(1, chosen_BW)
        scores_BW = scores.gather(1, chosen_BW)
        index_BW = num_made + chosen_BW
        num_made += scores.shape[1]
    return _joined(levels, head, slots, None)


def sampled_lanes(
    batch: Batch, head: BlockHead, slots: Slots, config: SpecConfig, vocab_size: int
) -> ExplicitCandidates:
    """Draw K lanes of S drafts, each from its exact distribution q: the slot's, given the lane's token before it."""
    k = config.topk
    tokens_BW = slots.bonus[:, None]
    scores_BW = torch.full(tokens_BW.shape, 1.0 if config.score == "prob" else 0.0)
    levels: list[Level] = []
    draft_probs = []
    for depth in range(config.num_steps):
        count = 1 if depth else k  # of each parent
        logits_BWV, confidence_B = _read(head, slots, depth, tokens_BW)
        rows = Parents(logits_BWV.flatten(0, 1), batch.seq_lens, depth)
        drafts = draft(batch, rows, count, head.d2t, config, vocab_size)
        own_scores = drafts.topk_scores.unflatten(0, tokens_BW.shape)
        scores = child_scores(scores_BW, own_scores, config.score).flatten(1)
        tokens = drafts.topk_index.unflatten(0, tokens_BW.shape).flatten(1)
        lane = torch.arange(k).expand_as(tokens)
        parents = lane + (depth - 1) * k if depth else torch.full_like(tokens, -1)
        levels.append(Level(tokens, parents, scores, logits_BWV, confidence_B))
        if drafts.draft_prob is not None:
            draft_probs.append(drafts.draft_prob.unflatten(0, tokens_BW.shape))
        tokens_BW = tokens
        scores_BW = scores
    return _joined(levels, head, slots, torch.cat(draft_probs, 1) if draft_probs else None)


def _read(
    head: BlockHead, slots: Slots, depth: int, tokens_BW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute logits [B, W, draft vocabulary] of the tokens after tokens_BW, and the confidence after the first."""
    hidden_BWH = slots.hidden[:, depth, None].expand(-1, tokens_BW.shape[1], -1)
    logits_RV = head.biased(head.logits(hidden_BWH.flatten(0, 1)), tokens_BW.flatten())
    logits_BWV = logits_RV.unflatten(0, tokens_BW.shape)
    has_head = head.block.confidence != "none"
    return logits_BWV, head.confidence(slots.hidden[:, depth], tokens_BW[:, 0]) if has_head else None


def _joined(levels: list[Level], head: BlockHead, slots: Slots, draft_prob: torch.Tensor | None) -> ExplicitCandidates:
    """Join the levels; those deeper than max_len allows, or behind a low confidence, do not exist.

    The first parent of a depth decides for all. It does so before the drafts of that depth are drawn, so that a sampled
    draft that is offered still has distribution q.
    """
    depths_B = slots.depths.clamp(max=len(levels))
    confidence = [level.confidence for level in levels if level.confidence is not None]
    if head.block.cuts:
        is_low_BS = torch.stack([torch.sigmoid(logit_B.double()) < head.block.threshold for logit_B in confidence], 1)
        depths_B = torch.minimum(depths_B, (is_low_BS.long().cumsum(1) == 0).sum(1))
    ends = torch.tensor([0, *(level.tokens.shape[1] for level in levels)]).cumsum(0)
    return ExplicitCandidates(
        tokens=torch.cat([level.tokens for level in levels], 1),
        parents=torch.cat([level.parents for level in levels], 1),
        scores=torch.cat([level.scores for level in levels], 1),
        num_alive=ends[depths_B].int(),
        confidence=torch.stack(confidence, 1) if confidence else None,
        draft_logits=tuple(level.logits for level in levels),
        draft_prob=draft_prob,
    )
