"""EAGLE-2's expansion of the K lanes in each step (arXiv 2406.16858).

Children are ranked by the keys of specsim.fast.vocabulary.topk: of equal scores, the lower index is better.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.fast.drafting.lanes import Lanes, hidden_block
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.vocabulary.topk import TAKEN, best_of, index_of, key_of


@triton.jit
@no_type_check
def extended(scores, topk_scores, LOG: tl.constexpr):
    """Compute children's scores: the product, or sum of logarithms, along the path, never above the parent's."""
    return tl.minimum(scores + topk_scores if LOG else scores * topk_scores, scores)


@triton.jit
@no_type_check
def _best_children(keys, child, k, LANES: tl.constexpr):
    """Select the k best of LANES² children of each row by their keys, best first, [ROWS, LANES]."""
    if LANES > 8:  # too many to hold each against each other
        best = index_of(best_of(keys, k, LANES))
    else:
        better = (keys[:, None, :] > keys[:, :, None]).to(tl.int32)
        rank = tl.sum(better, axis=2)[:, :, None]
        lane = tl.arange(0, LANES)[None, None, :]
        best = tl.sum(tl.where(rank == lane, child[:, :, None], 0), axis=1)
    return best


@triton.jit
@no_type_check
def _end_step(step_ptr, step):
    """Add one to the step's number, in the last program that still reads it."""
    tl.debug_barrier()  # every thread of this one is done with it
    if tl.atomic_add(step_ptr + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(step_ptr + 1, 0)
        tl.store(step_ptr, step + 1)


@kernel
@no_type_check
def _expand_kernel(
    topk_scores_ptr,
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
    """Add the K² children of each request, and make lanes of the K best if another step follows.

    Programs of one request each rank the children and share the copy of the hidden state; the first writes the rest.
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
        scores = extended(scores, tl.load(topk_scores_ptr + request * k * k + child, mask=mask, other=0.0), LOG)
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
    topk_scores_ptr,
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
    """Add one child of every lane, which needs no selection and no new parents."""
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
        entry = (step + 1) * k + lane
        tokens = tl.load(topk_index_ptr + rows, mask=mask)
        candidate = request * k * num_steps + entry
        scores = tl.load(lane_ptrs.scores_ptr + candidate - k, mask=mask, other=0.0)
        scores = extended(scores, tl.load(topk_scores_ptr + rows, mask=mask, other=0.0), LOG)
        tl.store(lane_ptrs.tokens_ptr + candidate, tokens, mask=mask)
        tl.store(lane_ptrs.scores_ptr + candidate, scores, mask=mask)
        tl.store(lane_ptrs.lane_tokens_ptr + rows, tokens, mask=mask_lane)
        tl.store(lane_ptrs.parent_list_ptr + request * (k * (num_steps - 1) + 1) + entry + 1, entry, mask=mask_lane)
        tl.store(lane_ptrs.path_ptr + rows * num_steps + step + 1, lane.to(tl.int32), mask=mask_lane)
    _end_step(lane_ptrs.step_ptr, step)


def expand(
    lanes: Lanes,
    topk_scores_BKK: torch.Tensor,
    topk_index_BKK: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> Lanes:
    """Add the lanes' children to the candidates in place, and make lanes of the K best, best first.

    A lane of sampled drafts has one child, its next token. The launches are the same at every step. The step's number,
    and whether it is the last, after which no lane changes, are read from lanes.step on the device.
    """
    require_contiguous(topk_scores_BKK=topk_scores_BKK, topk_index_BKK=topk_index_BKK, hidden_BKH=hidden_BKH)
    advance = _expand_lanes if config.topk == 1 or config.is_sampled else _expand_tree
    advance(lanes, topk_scores_BKK, topk_index_BKK, hidden_BKH, config)
    return lanes


def _expand_tree(
    lanes: Lanes,
    topk_scores_BKK: torch.Tensor,
    topk_index_BKK: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    num_steps = config.num_steps
    places = next_power_of_2(k)
    block = hidden_block(hidden_size, min(1024, max(1, 8192 // places)))
    requests = block_of(batch_size, 1, places * max(places**3 if places <= 8 else places, block, num_steps))
    _expand_kernel[(ceil_div(batch_size, requests), ceil_div(hidden_size, block))](
        topk_scores_ptr=topk_scores_BKK,
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
    topk_scores_BK1: torch.Tensor,
    topk_index_BK1: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    block = hidden_block(hidden_size)
    num_lanes = batch_size * k
    rows = block_of(num_lanes, 4, block)
    _expand_lanes_kernel[(ceil_div(num_lanes, rows), ceil_div(hidden_size, block))](
        topk_scores_ptr=topk_scores_BK1,
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
