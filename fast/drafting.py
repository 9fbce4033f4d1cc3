"""EAGLE-2's dynamic tree (arXiv 2406.16858): K lanes expanded step by step, then the N-1 best candidates; and lanes of
sampled drafts, each of which has one child a step.

Every choice ranks the keys of specsim.fast.vocabulary.topk, so that of equal values the lower index is the better.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, DraftInput, State
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.vocabulary.topk import TAKEN, best_of, index_of, key_of, ordered

_HIDDEN_BLOCK = 256


class LaneTables(NamedTuple):
    """Lanes as kernels take them."""

    step_ptr: torch.Tensor
    lane_tokens_ptr: torch.Tensor
    path_ptr: torch.Tensor
    hidden_ptr: torch.Tensor
    tokens_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    parent_list_ptr: torch.Tensor


@dataclass(frozen=True, slots=True)
class Lanes(State):
    """Buffers of the draft loop; every step changes them in place."""

    step: torch.Tensor  # i32 [2], step of the loop, and programs of a launch that are done with it (0 between launches)
    tokens: torch.Tensor  # i64 [B, K], each lane's last token, best lane first
    path: torch.Tensor  # i32 [B, K, S], lane that holds lane k's token of each step, -1 for steps to come
    hidden: torch.Tensor  # [B, K, H]
    candidates: Candidates  # all proposed so far; a step's lanes are those in its block of parent_list

    @classmethod
    def empty(
        cls,
        batch_size: int,
        hidden_size: int,
        config: SpecConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        vocab_size: int = 0,
    ) -> Self:
        """Buffers with nothing in them; `start_lanes` begins a draft phase. vocab_size: of draft distributions."""
        k = config.topk
        num_steps = config.num_steps
        draft_prob = None

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        if config.has_draft_prob:
            draft_prob = buffer(batch_size, config.num_parents, vocab_size, dtype=torch.float32)
        return cls(
            step=buffer(2, dtype=torch.int32),
            tokens=buffer(batch_size, k),
            path=buffer(batch_size, k, num_steps, dtype=torch.int32),
            hidden=buffer(batch_size, k, hidden_size, dtype=dtype),
            candidates=Candidates(
                tokens=buffer(batch_size, config.num_candidates),
                scores=buffer(batch_size, config.num_candidates, dtype=torch.float32),
                parent_list=buffer(batch_size, max(1, k * (num_steps - 1) + 1)),
                draft_prob=draft_prob,
            ),
        )

    @property
    def tables(self) -> LaneTables:
        grown = self.candidates
        return LaneTables(self.step, self.tokens, self.path, self.hidden, grown.tokens, grown.scores, grown.parent_list)


@triton.jit
@no_type_check
def _log(prob):
    return tl.where(prob > 0, tl.log(tl.where(prob > 0, prob, 1.0)), -float("inf"))


@triton.jit
@no_type_check
def _extended(scores, prob, LOG: tl.constexpr):
    """Scores of children: the path's product (or sum of logs), never above the parent's."""
    return tl.minimum(scores + _log(prob) if LOG else scores * prob, scores)


@kernel
@no_type_check
def _start_kernel(
    topk_p_ptr,
    topk_index_ptr,
    hidden_ptr,
    lane_ptrs,
    num_lanes,
    num_candidates,
    k,
    num_steps,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lanes of all requests one after the other; programs of one row block share out the hidden state."""
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request = rows // k
    lane = rows % k
    mask = rows < num_lanes
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_hidden = mask & (offs < HIDDEN)
    hidden = tl.load(hidden_ptr + request * HIDDEN + offs, mask=mask_hidden)
    tl.store(lane_ptrs.hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
    if tl.program_id(1) == 0:
        if tl.program_id(0) == 0:
            tl.store(lane_ptrs.step_ptr, 0)
            tl.store(lane_ptrs.step_ptr + 1, 0)
        tokens = tl.load(topk_index_ptr + rows, mask=mask)
        scores = tl.load(topk_p_ptr + rows, mask=mask)
        if LOG:
            scores = _log(scores)
        tl.store(lane_ptrs.lane_tokens_ptr + rows, tokens, mask=mask)
        candidate = request * num_candidates + lane
        tl.store(lane_ptrs.tokens_ptr + candidate, tokens, mask=mask)
        tl.store(lane_ptrs.scores_ptr + candidate, scores, mask=mask)
        steps = tl.arange(0, STEPS)[None, :]
        held_by = tl.where(steps == 0, lane, -1).to(tl.int32)
        tl.store(lane_ptrs.path_ptr + rows * num_steps + steps, held_by, mask=mask & (steps < num_steps))
        block = request * (k * (num_steps - 1) + 1)
        tl.store(lane_ptrs.parent_list_ptr + block, -1, mask=mask & (lane == 0))
        tl.store(lane_ptrs.parent_list_ptr + block + 1 + lane, lane, mask=mask & (num_steps > 1))


def start_lanes(draft_input: DraftInput, lanes: Lanes, config: SpecConfig) -> None:
    """Begin with the root's children as lanes, each with the root's hidden state, and their distribution."""
    batch_size, k, hidden_size = lanes.hidden.shape
    require_contiguous(topk_p=draft_input.topk_p, topk_index=draft_input.topk_index, hidden=draft_input.hidden)
    block = _hidden_block(hidden_size)
    rows = block_of(batch_size * k, 16, max(block, config.num_steps))
    _start_kernel[(ceil_div(batch_size * k, rows), ceil_div(hidden_size, block))](
        topk_p_ptr=draft_input.topk_p,
        topk_index_ptr=draft_input.topk_index,
        hidden_ptr=draft_input.hidden,
        lane_ptrs=lanes.tables,
        num_lanes=batch_size * k,
        num_candidates=config.num_candidates,
        k=k,
        num_steps=config.num_steps,
        LOG=config.score == "logprob",
        ROWS=rows,
        STEPS=next_power_of_2(config.num_steps),
        HIDDEN=hidden_size,
        BLOCK=block,
    )
    if lanes.candidates.draft_prob is not None:
        if draft_input.draft_prob is None:
            raise ValueError("the draft input has no draft_prob, which this setting's verifier reads")
        lanes.candidates.draft_prob[:, 0].copy_(draft_input.draft_prob)


@triton.jit
@no_type_check
def _best_children(keys, child, k, LANES: tl.constexpr):
    """The k best of LANES² children of each row by their keys, best first, [ROWS, LANES]."""
    if LANES > 8:  # too many to hold each against each other
        best = index_of(best_of(keys, k, LANES))
    else:
        better = (keys[:, None, :] > keys[:, :, None]).to(tl.int32)
        place = tl.sum(better, axis=2)[:, :, None]
        lane = tl.arange(0, LANES)[None, None, :]
        best = tl.sum(tl.where(place == lane, child[:, :, None], 0), axis=1)
    return best


@triton.jit
@no_type_check
def _end_step(step_ptr, step):
    """The last program that is done with the step's number raises it."""
    tl.debug_barrier()  # every thread of this one is done with it
    if tl.atomic_add(step_ptr + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(step_ptr + 1, 0)
        tl.store(step_ptr, step + 1)


@kernel
@no_type_check
def _expand_kernel(
    topk_p_ptr,
    topk_index_ptr,
    hidden_ptr,
    lane_ptrs,
    batch_size,
    k,
    num_steps,
    LOG: tl.constexpr,
    ANCESTOR: tl.constexpr,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The K² children of each request, and, if another step follows, the K best of them as its lanes.

    Programs of one request each rank the children and share out the hidden state; the first writes all else.
    """
    await_input(PDL)
    step = tl.load(lane_ptrs.step_ptr)
    is_first = tl.program_id(1) == 0
    if step < num_steps - 1:
        request = (tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)[:, None]).to(tl.int64)
        mask_request = request < batch_size
        child = tl.arange(0, LANES * LANES)[None, :]
        pool = request * (k + (num_steps - 1) * k * k)
        before = k + step * k * k
        block = request * (k * (num_steps - 1) + 1) + 1 + step * k
        mask = mask_request & (child < k * k)
        parent = tl.maximum(tl.load(lane_ptrs.parent_list_ptr + block + child // k, mask=mask, other=0), 0)
        scores = tl.load(lane_ptrs.scores_ptr + pool + parent, mask=mask, other=0.0)
        scores = _extended(scores, tl.load(topk_p_ptr + request * k * k + child, mask=mask, other=0.0), LOG)
        tokens = tl.load(topk_index_ptr + request * k * k + child, mask=mask & is_first)
        tl.store(lane_ptrs.tokens_ptr + pool + before + child, tokens, mask=mask & is_first)
        tl.store(lane_ptrs.scores_ptr + pool + before + child, scores, mask=mask & is_first)
        if step < num_steps - 2:
            lane = tl.arange(0, LANES)[None, :]
            chosen = _best_children(tl.where(mask, key_of(scores, child), TAKEN), child, k, LANES)
            mask_lane = mask_request & (lane < k)
            if is_first:
                lane_tokens = tl.load(topk_index_ptr + request * k * k + chosen, mask=mask_lane)
                tl.store(lane_ptrs.lane_tokens_ptr + request * k + lane, lane_tokens, mask=mask_lane)
                tl.store(lane_ptrs.parent_list_ptr + block + k + lane, chosen + before, mask=mask_lane)
            rows = tl.reshape(request * k + lane, [REQUESTS * LANES, 1])
            source = tl.reshape(request * k + chosen // k, [REQUESTS * LANES, 1])
            mask_rows = tl.reshape(mask_lane, [REQUESTS * LANES, 1])
            offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask_hidden = mask_rows & (offs < HIDDEN)
            hidden = tl.load(hidden_ptr + source * HIDDEN + offs, mask=mask_hidden)
            tl.store(lane_ptrs.hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
            if is_first:
                steps = tl.arange(0, STEPS)[None, :]
                mask_path = mask_rows & (steps < num_steps)
                held_by = tl.load(
                    lane_ptrs.path_ptr + (source if ANCESTOR else rows) * num_steps + steps, mask=mask_path
                )
                tl.debug_barrier()  # every lane's path is read before any is written
                held_by = tl.where(steps == step + 1, (rows % k).to(tl.int32), held_by)
                tl.store(lane_ptrs.path_ptr + rows * num_steps + steps, held_by, mask=mask_path)
    _end_step(lane_ptrs.step_ptr, step)


@kernel
@no_type_check
def _expand_lanes_kernel(
    topk_p_ptr,
    topk_index_ptr,
    hidden_ptr,
    lane_ptrs,
    num_lanes,
    k,
    num_steps,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One child of every lane a step: nothing to choose and nothing to re-parent."""
    await_input(PDL)
    step = tl.load(lane_ptrs.step_ptr)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask = (rows < num_lanes) & (step < num_steps - 1)
    mask_lane = mask & (step < num_steps - 2)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_hidden = mask_lane & (offs < HIDDEN)
    hidden = tl.load(hidden_ptr + rows * HIDDEN + offs, mask=mask_hidden)
    tl.store(lane_ptrs.hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
    if tl.program_id(1) == 0:
        request = rows // k
        lane = rows % k
        place = (step + 1) * k + lane
        tokens = tl.load(topk_index_ptr + rows, mask=mask)
        candidate = request * k * num_steps + place
        scores = tl.load(lane_ptrs.scores_ptr + candidate - k, mask=mask, other=0.0)
        scores = _extended(scores, tl.load(topk_p_ptr + rows, mask=mask, other=0.0), LOG)
        tl.store(lane_ptrs.tokens_ptr + candidate, tokens, mask=mask)
        tl.store(lane_ptrs.scores_ptr + candidate, scores, mask=mask)
        tl.store(lane_ptrs.lane_tokens_ptr + rows, tokens, mask=mask_lane)
        tl.store(lane_ptrs.parent_list_ptr + request * (k * (num_steps - 1) + 1) + place + 1, place, mask=mask_lane)
        tl.store(lane_ptrs.path_ptr + rows * num_steps + step + 1, lane.to(tl.int32), mask=mask_lane)
    _end_step(lane_ptrs.step_ptr, step)


def expand(
    lanes: Lanes,
    topk_p_BKK: torch.Tensor,
    topk_index_BKK: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> None:
    """The lanes' children as candidates and the K best of them as lanes; the same launches at every step. A lane of
    sampled drafts has one child.

    Which step it is, and whether it is the last, after which no lane changes, is read from lanes.step on the device.
    """
    require_contiguous(topk_p_BKK=topk_p_BKK, topk_index_BKK=topk_index_BKK, hidden_BKH=hidden_BKH)
    advance = _expand_lanes if config.topk == 1 or config.is_sampled else _expand_tree
    advance(lanes, topk_p_BKK, topk_index_BKK, hidden_BKH, config)


def _expand_tree(
    lanes: Lanes,
    topk_p_BKK: torch.Tensor,
    topk_index_BKK: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    num_steps = config.num_steps
    places = next_power_of_2(k)
    block = _hidden_block(hidden_size, min(1024, max(1, 8192 // places)))
    requests = block_of(batch_size, 1, places * max(places**3 if places <= 8 else places, block, num_steps))
    _expand_kernel[(ceil_div(batch_size, requests), ceil_div(hidden_size, block))](
        topk_p_ptr=topk_p_BKK,
        topk_index_ptr=topk_index_BKK,
        hidden_ptr=hidden_BKH,
        lane_ptrs=lanes.tables,
        batch_size=batch_size,
        k=k,
        num_steps=num_steps,
        LOG=config.score == "logprob",
        ANCESTOR=config.draft_kv == "ancestor",
        REQUESTS=requests,
        LANES=places,
        STEPS=next_power_of_2(num_steps),
        HIDDEN=hidden_size,
        BLOCK=block,
        num_warps=1 if places <= 32 else 4,
    )


def _expand_lanes(
    lanes: Lanes,
    topk_p_BK1: torch.Tensor,
    topk_index_BK1: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    block = _hidden_block(hidden_size)
    num_lanes = batch_size * k
    rows = block_of(num_lanes, 4, block)
    _expand_lanes_kernel[(ceil_div(num_lanes, rows), ceil_div(hidden_size, block))](
        topk_p_ptr=topk_p_BK1,
        topk_index_ptr=topk_index_BK1,
        hidden_ptr=hidden_BKH,
        lane_ptrs=lanes.tables,
        num_lanes=num_lanes,
        k=k,
        num_steps=config.num_steps,
        LOG=config.score == "logprob",
        ROWS=rows,
        HIDDEN=hidden_size,
        BLOCK=block,
    )


@triton.jit
@no_type_check
def selected(scores, mask, count):
    """Select each row's `count` best of scores [ROWS, BLOCK]: (mask, number of selected ones before each).

    A bound is raised two bits at a time until `count` reach it, or else it is the count-th best; kept is what is above
    it, and of its equals the first. Three counts share a word of 64 bits, so that they are one sum.
    """
    rank = tl.where(mask, ordered(scores), -0x80000000)  # no number's rank is that low
    bound = tl.full([scores.shape[0], 1], -0x80000000, tl.int64)
    reached = tl.full([scores.shape[0], 1], -1, tl.int64)
    shift = 30
    while (shift >= 0) & (tl.max(tl.max((reached != count).to(tl.int32), axis=1), axis=0) > 0):
        unit = tl.full((), 1, tl.int64) << shift
        counts = tl.zeros(rank.shape, tl.int64)
        for part in tl.static_range(1, 4):
            raised = (bound + part * unit).to(tl.int32)
            counts += (rank >= raised).to(tl.int64) << (20 * part - 20)
        sums = tl.sum(counts, axis=1, keep_dims=True)
        lower = bound
        for part in tl.static_range(1, 4):
            reaching = (sums >> (20 * part - 20)) & 0xFFFFF
            bound = tl.where(reaching >= count, lower + part * unit, bound)
            reached = tl.where(reaching >= count, reaching, reached)
        shift -= 2
    above = rank > bound.to(tl.int32)
    equal = (rank == bound.to(tl.int32)) & mask
    counted = tl.cumsum((above.to(tl.int64) << 32) | equal.to(tl.int64), axis=1)  # of both at once
    missing = count - tl.sum(above.to(tl.int32), axis=1, keep_dims=True)
    equals = (counted & 0xFFFFFFFF).to(tl.int32)
    kept = above | (equal & (equals <= missing))
    return kept, (counted >> 32).to(tl.int32) + tl.minimum(equals, missing) - kept.to(tl.int32)


@kernel
@no_type_check
def _select_kernel(
    scores_ptr, out_ptr, num_rows, num_candidates, count, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    index = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (index < num_candidates)
    scores = tl.load(scores_ptr + rows * num_candidates + index, mask=mask, other=0.0)
    kept, place = selected(scores, mask, count)
    tl.store(out_ptr + rows * count + place, index, mask=kept)


def select(scores: torch.Tensor, count: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The `count` best candidates as ascending flat indices, i64 [B, count], found and put in order without a sort."""
    num_rows, num_candidates = scores.shape
    if count > num_candidates:
        raise ValueError(f"{count} candidates to select, there are {num_candidates}")
    require_contiguous(scores=scores)
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device) if out is None else out
    block = next_power_of_2(max(num_candidates, 1))
    rows = block_of(num_rows, 1, block)
    _select_kernel[(ceil_div(num_rows, rows),)](
        scores_ptr=scores,
        out_ptr=out,
        num_rows=num_rows,
        num_candidates=num_candidates,
        count=count,
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )
    return out


def _hidden_block(hidden_size: int, on_gpu: int = _HIDDEN_BLOCK) -> int:
    return min(next_power_of_2(hidden_size), block_of(hidden_size, on_gpu))
