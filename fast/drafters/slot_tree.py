"""Candidates from the slots of a block: the best-first tree over them, or sampled lanes."""

import math
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, ExplicitCandidates
from specsim.fast.drafters.block_head import BlockHead
from specsim.fast.drafting import extended
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2
from specsim.fast.tree.explicit import ExplicitTables
from specsim.fast.vocabulary.draft_distribution import DrawnDrafts, Loop, Root, Vocabulary, draw_drafts, inverse_of
from specsim.fast.vocabulary.topk import TAKEN, best_of, draft_topk, index_of, key_of


class LevelLanes(NamedTuple):
    """Nodes of one depth that have children, as kernel arguments, [B, W]."""

    tokens: torch.Tensor  # i64
    scores: torch.Tensor  # f32
    candidates: torch.Tensor  # i64, -1 for the root


@dataclass(frozen=True, slots=True)
class Level:
    """Sizes of one depth."""

    depth: int
    first: int  # candidate
    num_lanes: int  # W
    num_children: int  # of each lane
    num_next: int  # lanes of the next depth


@kernel
@no_type_check
def _level_kernel(
    topk_scores_ptr,
    topk_index_ptr,
    lane_ptrs,
    next_ptrs,
    candidate_ptrs,
    first,
    num_candidates,
    num_lanes,
    num_children,
    num_next,
    row_lanes,
    LOG: tl.constexpr,
    SELECT: tl.constexpr,
    NEXT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one request's candidates of a depth, and choose those that have children.

    row_lanes: lanes that share a row of drafts, 1 or all.
    """
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, BLOCK)
    mask = child < num_lanes * num_children
    lane = child // num_children
    row = (request * num_lanes + lane) // row_lanes
    entry = row * num_children + child % num_children
    parent_lane = request * num_lanes + lane
    tokens = tl.load(topk_index_ptr + entry, mask=mask, other=0)
    above = tl.load(lane_ptrs.scores + parent_lane, mask=mask, other=0.0)
    scores = extended(above, tl.load(topk_scores_ptr + entry, mask=mask, other=0.0), LOG)
    parents = tl.load(lane_ptrs.candidates + parent_lane, mask=mask, other=-1)
    candidate = request * num_candidates + first + child
    tl.store(candidate_ptrs.tokens_ptr + candidate, tokens, mask=mask)
    tl.store(candidate_ptrs.scores_ptr + candidate, scores, mask=mask)
    tl.store(candidate_ptrs.parents_ptr + candidate, parents, mask=mask)
    next_lane = tl.arange(0, NEXT)
    chosen = next_lane
    if SELECT:
        keys = tl.where(mask, key_of(scores, child), TAKEN)
        chosen = tl.reshape(index_of(best_of(keys[None, :], num_next, NEXT)), [NEXT]).to(tl.int32)
    mask_next = next_lane < num_next
    chosen = tl.where(mask_next, chosen, 0)
    following = request * num_next + next_lane
    tl.store(next_ptrs.tokens + following, tl.gather(tokens, chosen, 0), mask=mask_next)
    tl.store(next_ptrs.scores + following, tl.gather(scores, chosen, 0), mask=mask_next)
    tl.store(next_ptrs.candidates + following, (first + chosen).to(tl.int64), mask=mask_next)


@kernel
@no_type_check
def _alive_kernel(
    candidate_ptrs,
    confidence_ptr,
    rows_ptr,
    lens_ptr,
    ends_ptr,
    num_steps,
    max_len,
    least,
    CUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count one request's candidates, of the depths before a low confidence and within max_len."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.minimum(tl.maximum(max_len - 1 - tl.load(lens_ptr + request), 0), num_steps)
    depth = tl.where(tl.load(rows_ptr + request) >= 0, depth, 0)
    if CUTS:
        follows = tl.full((), 1, tl.int32)
        num_confident = tl.full((), 0, tl.int64)
        for step in range(num_steps):
            is_high = tl.load(confidence_ptr + request * num_steps + step) >= least
            follows = tl.where(is_high, follows, 0)
            num_confident += follows
        depth = tl.minimum(depth, num_confident)
    tl.store(candidate_ptrs.num_alive_ptr + request, tl.load(ends_ptr + depth))


class SlotTree:
    """Growth of candidates for a head and a setting, with launches that are the same in every round."""

    def __init__(self, head: BlockHead, config: SpecConfig, vocab_size: int) -> None:
        self._head = head
        self._config = config
        sizes = config.level_sizes
        ends = [sum(sizes[:depth]) for depth in range(len(sizes) + 1)]
        self._ends = torch.tensor(ends, dtype=torch.int32, device=head.device)
        self._depths = torch.arange(len(sizes), dtype=torch.int32, device=head.device)
        self._vocabulary = Vocabulary(head.d2t, None if head.d2t is None else inverse_of(head.d2t, vocab_size))
        self._levels: list[Level] = []
        num_lanes = 1
        for depth, size in enumerate(sizes):
            num_next = size if config.is_sampled else min(config.num_draft_tokens - 1, size)
            self._levels.append(Level(depth, ends[depth], num_lanes, size // num_lanes, num_next))
            num_lanes = num_next

    def grow(self, batch: Batch, hidden_SBH: torch.Tensor, bonus: torch.Tensor, out: ExplicitCandidates) -> None:
        """Grow every request's tree, or draw its lanes, from the hidden states of its slots.

        Slots are read by one product, and without a Markov head one ranking serves all lanes of a depth.
        """
        config = self._config
        head = self._head
        logits_SBV = head.logits(hidden_SBH.flatten(0, 1)).unflatten(0, hidden_SBH.shape[:2])
        lanes = LevelLanes(
            bonus.long()[:, None],
            torch.full((batch.size, 1), 0.0 if config.score == "logprob" else 1.0, device=head.device),
            torch.full((batch.size, 1), -1, dtype=torch.int64, device=head.device),
        )
        for level in self._levels:
            if out.confidence is not None:
                confidence_B = head.confidence(hidden_SBH[level.depth], lanes.tokens[:, 0].contiguous())
                out.confidence[:, level.depth].copy_(confidence_B)
            drafts = self._drafts(batch, logits_SBV[level.depth], lanes.tokens, level, out)
            lanes = self._extend(drafts, lanes, level, out)
        self._count(batch, out)

    def _drafts(
        self, batch: Batch, logits_BV: torch.Tensor, before_BW: torch.Tensor, level: Level, out: ExplicitCandidates
    ) -> DrawnDrafts:
        """Draft the children of every lane, or of one lane for all where lanes do not matter."""
        config = self._config
        head = self._head
        logits_RV = logits_BV
        if level.num_lanes > 1 and (head.block.markov_rank or config.is_sampled):
            logits_RV = logits_BV.repeat_interleave(level.num_lanes, dim=0)
        logits_RV = head.biased(logits_RV, before_BW.flatten())
        drafts = DrawnDrafts(*draft_topk(logits_RV, level.num_children, head.d2t, score=config.score))
        if config.is_sampled:
            loop = Loop(self._depths[level.depth - 1 :], None, config.num_steps) if level.depth else None
            root = Root(batch.seq_lens)
            draw_drafts(batch, logits_RV, root, self._vocabulary, config, drafts, out.draft_prob, loop)
        return drafts

    def _extend(self, drafts: DrawnDrafts, lanes: LevelLanes, level: Level, out: ExplicitCandidates) -> LevelLanes:
        """Write the candidates of a depth, and find the lanes of the next one."""
        size = len(out.tokens)
        shape = (size, level.num_next)
        following = LevelLanes(*(x.new_empty(shape) for x in lanes))
        _level_kernel[(size,)](
            topk_scores_ptr=drafts.topk_scores,
            topk_index_ptr=drafts.topk_index,
            lane_ptrs=lanes,
            next_ptrs=following,
            candidate_ptrs=ExplicitTables.of(out),
            first=level.first,
            num_candidates=out.tokens.shape[1],
            num_lanes=level.num_lanes,
            num_children=level.num_children,
            num_next=level.num_next,
            row_lanes=size * level.num_lanes // max(1, len(drafts.topk_scores)),
            LOG=self._config.score == "logprob",
            SELECT=not self._config.is_sampled,
            NEXT=next_power_of_2(level.num_next),
            BLOCK=next_power_of_2(level.num_lanes * level.num_children),
        )
        return following

    def _count(self, batch: Batch, out: ExplicitCandidates) -> None:
        """Write how many candidates of each request exist."""
        block = self._head.block
        threshold = block.threshold
        least = math.log(threshold / (1 - threshold)) if 0 < threshold < 1 else math.inf
        _alive_kernel[(batch.size,)](
            candidate_ptrs=ExplicitTables.of(out),
            confidence_ptr=out.confidence,
            rows_ptr=batch.req_pool_indices,
            lens_ptr=batch.seq_lens,
            ends_ptr=self._ends,
            num_steps=self._config.num_steps,
            max_len=self._config.length_limit,
            least=least,
            CUTS=block.cuts,
        )
