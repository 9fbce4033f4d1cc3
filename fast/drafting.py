"""EAGLE-2's dynamic tree (arXiv 2406.16858): K lanes expanded step by step, then the N-1 best candidates; and lanes of
sampled drafts, each of which has one child a step.

Every choice ranks the keys of specsim.fast.vocabulary.topk, so that of equal values the lower index is the better.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, DraftInput, State
from specsim.fast.runtime.launch import await_input, block_of, kernel, require_contiguous
from specsim.fast.vocabulary.topk import TAKEN, best_of, index_of, key_of, ordered

_HIDDEN_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Lanes(State):
    """The draft loop's buffers; every step changes them in place.

    step: i32 [2], current_draft_step, read on the device only, and how many programs of a launch are done with it, 0
    between launches. tokens: i64 [B, K], each lane's last token, best lane first. path: i32 [B, K, S], the lane that
    holds lane k's token of each step, -1 for steps to come. hidden: [B, K, H]. candidates: all proposed so far; the
    lanes of a step are those whose indices are the step's block of parent_list.
    """

    step: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor
    hidden: torch.Tensor
    candidates: Candidates

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
        """Buffers with nothing in them; `start_lanes` begins a draft phase. vocab_size: of draft laws."""
        k, num_steps, laws = config.topk, config.num_steps, None

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        if config.has_draft_prob:
            laws = buffer(batch_size, config.num_parents, vocab_size, dtype=torch.float32)
        return cls(
            step=buffer(2, dtype=torch.int32),
            tokens=buffer(batch_size, k),
            path=buffer(batch_size, k, num_steps, dtype=torch.int32),
            hidden=buffer(batch_size, k, hidden_size, dtype=dtype),
            candidates=Candidates(
                tokens=buffer(batch_size, config.num_candidates),
                scores=buffer(batch_size, config.num_candidates, dtype=torch.float32),
                parent_list=buffer(batch_size, max(1, k * (num_steps - 1) + 1)),
                draft_prob=laws,
            ),
        )

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order in which kernels take them."""
        candidates = self.candidates.tokens, self.candidates.scores, self.candidates.parent_list
        return self.step, self.tokens, self.path, self.hidden, *candidates


@triton.jit
def _log(prob):
    return tl.where(prob > 0, tl.log(tl.where(prob > 0, prob, 1.0)), -float("inf"))


@triton.jit
def _extended(scores, prob, LOG: tl.constexpr):
    """Scores of children: the path's product (or sum of logs), never above the parent's."""
    return tl.minimum(scores + _log(prob) if LOG else scores * prob, scores)


@kernel
def _start_kernel(
    topk_p_ptr, topk_index_ptr, hidden_ptr, step_ptr, lane_tokens_ptr, path_ptr, lane_hidden_ptr, tokens_ptr,
    scores_ptr, parent_list_ptr, num_lanes, num_candidates, k, num_steps, LOG: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lanes of all requests one after the other; programs of one row block share out the hidden state."""
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request, lane = rows // k, rows % k
    mask = rows < num_lanes
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_hidden = mask & (offs < HIDDEN)
    hidden = tl.load(hidden_ptr + request * HIDDEN + offs, mask=mask_hidden)
    tl.store(lane_hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
    if tl.program_id(1) == 0:
        if tl.program_id(0) == 0:
            tl.store(step_ptr, 0)
            tl.store(step_ptr + 1, 0)
        tokens = tl.load(topk_index_ptr + rows, mask=mask)
        scores = tl.load(topk_p_ptr + rows, mask=mask)
        if LOG:
            scores = _log(scores)
        tl.store(lane_tokens_ptr + rows, tokens, mask=mask)
        candidate = request * num_candidates + lane
        tl.store(tokens_ptr + candidate, tokens, mask=mask)
        tl.store(scores_ptr + candidate, scores, mask=mask)
        steps = tl.arange(0, STEPS)[None, :]
        held_by = tl.where(steps == 0, lane, -1).to(tl.int32)
        tl.store(path_ptr + rows * num_steps + steps, held_by, mask=mask & (steps < num_steps))
        block = request * (k * (num_steps - 1) + 1)
        tl.store(parent_list_ptr + block, -1, mask=mask & (lane == 0))
        tl.store(parent_list_ptr + block + 1 + lane, lane, mask=mask & (num_steps > 1))


def start_lanes(draft_input: DraftInput, lanes: Lanes, config: SpecConfig) -> None:
    """Step 0: the root's children are the lanes, each with the hidden state they came from, and their law the first."""
    batch_size, k, hidden_size = lanes.hidden.shape
    require_contiguous(topk_p=draft_input.topk_p, topk_index=draft_input.topk_index, hidden=draft_input.hidden)
    block = _hidden_block(hidden_size)
    rows = block_of(batch_size * k, 16, max(block, config.num_steps))
    _start_kernel[(triton.cdiv(batch_size * k, rows), triton.cdiv(hidden_size, block))](
        draft_input.topk_p, draft_input.topk_index, draft_input.hidden, *lanes.buffers, batch_size * k,
        config.num_candidates, k, config.num_steps, LOG=config.score == "logprob", ROWS=rows,
        STEPS=triton.next_power_of_2(config.num_steps), HIDDEN=hidden_size, BLOCK=block,
    )  # fmt: skip
    if lanes.candidates.draft_prob is not None:
        lanes.candidates.draft_prob[:, 0].copy_(draft_input.draft_prob)


@triton.jit
def _best_children(keys, child, k, LANES: tl.constexpr):
    """The k best of LANES² children of each row by their keys, best first, [ROWS, LANES]."""
    if LANES > 8:  # too many to hold each against each other
        best = index_of(best_of(keys, k, LANES))
    else:
        better = (keys[:, None, :] > keys[:, :, None]).to(tl.int32)
        place, lane = tl.sum(better, axis=2)[:, :, None], tl.arange(0, LANES)[None, None, :]
        best = tl.sum(tl.where(place == lane, child[:, :, None], 0), axis=1)
    return best


@triton.jit
def _end_step(step_ptr, step):
    """The last program that is done with the step's number raises it."""
    tl.debug_barrier()  # every thread of this one is done with it
    if tl.atomic_add(step_ptr + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(step_ptr + 1, 0)
        tl.store(step_ptr, step + 1)


@kernel
def _expand_kernel(
    topk_p_ptr, topk_index_ptr, hidden_ptr, step_ptr, lane_tokens_ptr, path_ptr, lane_hidden_ptr, tokens_ptr,
    scores_ptr, parent_list_ptr, batch_size, k, num_steps, LOG: tl.constexpr, ANCESTOR: tl.constexpr,
    REQUESTS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The K² children of each request, and, if another step follows, the K best of them as its lanes.

    Programs of one request each rank the children and share out the hidden state; the first writes all else.
    """
    await_input(PDL)
    step, is_first = tl.load(step_ptr), tl.program_id(1) == 0
    if step < num_steps - 1:
        request = (tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)[:, None]).to(tl.int64)
        mask_request, child = request < batch_size, tl.arange(0, LANES * LANES)[None, :]
        pool, before = request * (k + (num_steps - 1) * k * k), k + step * k * k
        block = request * (k * (num_steps - 1) + 1) + 1 + step * k
        mask = mask_request & (child < k * k)
        parent = tl.maximum(tl.load(parent_list_ptr + block + child // k, mask=mask, other=0), 0)
        scores = tl.load(scores_ptr + pool + parent, mask=mask, other=0.0)
        scores = _extended(scores, tl.load(topk_p_ptr + request * k * k + child, mask=mask, other=0.0), LOG)
        tokens = tl.load(topk_index_ptr + request * k * k + child, mask=mask & is_first)
        tl.store(tokens_ptr + pool + before + child, tokens, mask=mask & is_first)
        tl.store(scores_ptr + pool + before + child, scores, mask=mask & is_first)
        if step < num_steps - 2:
            lane = tl.arange(0, LANES)[None, :]
            chosen = _best_children(tl.where(mask, key_of(scores, child), TAKEN), child, k, LANES)
            mask_lane = mask_request & (lane < k)
            if is_first:
                lane_tokens = tl.load(topk_index_ptr + request * k * k + chosen, mask=mask_lane)
                tl.store(lane_tokens_ptr + request * k + lane, lane_tokens, mask=mask_lane)
                tl.store(parent_list_ptr + block + k + lane, chosen + before, mask=mask_lane)
            rows = tl.reshape(request * k + lane, [REQUESTS * LANES, 1])
            source = tl.reshape(request * k + chosen // k, [REQUESTS * LANES, 1])
            mask_rows = tl.reshape(mask_lane, [REQUESTS * LANES, 1])
            offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask_hidden = mask_rows & (offs < HIDDEN)
            hidden = tl.load(hidden_ptr + source * HIDDEN + offs, mask=mask_hidden)
            tl.store(lane_hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
            if is_first:
                steps = tl.arange(0, STEPS)[None, :]
                mask_path = mask_rows & (steps < num_steps)
                held_by = tl.load(path_ptr + (source if ANCESTOR else rows) * num_steps + steps, mask=mask_path)
                tl.debug_barrier()  # every lane's path is read before any is written
                held_by = tl.where(steps == step + 1, (rows % k).to(tl.int32), held_by)
                tl.store(path_ptr + rows * num_steps + steps, held_by, mask=mask_path)
    _end_step(step_ptr, step)


@kernel
def _expand_lanes_kernel(
    topk_p_ptr, topk_index_ptr, hidden_ptr, step_ptr, lane_tokens_ptr, path_ptr, lane_hidden_ptr, tokens_ptr,
    scores_ptr, parent_list_ptr, num_lanes, k, num_steps, LOG: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One child of every lane a step: nothing to choose and nothing to re-parent."""
    await_input(PDL)
    step = tl.load(step_ptr)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask = (rows < num_lanes) & (step < num_steps - 1)
    mask_lane = mask & (step < num_steps - 2)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_hidden = mask_lane & (offs < HIDDEN)
    hidden = tl.load(hidden_ptr + rows * HIDDEN + offs, mask=mask_hidden)
    tl.store(lane_hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
    if tl.program_id(1) == 0:
        request, lane = rows // k, rows % k
        place = (step + 1) * k + lane
        tokens, candidate = tl.load(topk_index_ptr + rows, mask=mask), request * k * num_steps + place
        scores = tl.load(scores_ptr + candidate - k, mask=mask, other=0.0)
        scores = _extended(scores, tl.load(topk_p_ptr + rows, mask=mask, other=0.0), LOG)
        tl.store(tokens_ptr + candidate, tokens, mask=mask)
        tl.store(scores_ptr + candidate, scores, mask=mask)
        tl.store(lane_tokens_ptr + rows, tokens, mask=mask_lane)
        tl.store(parent_list_ptr + request * (k * (num_steps - 1) + 1) + place + 1, place, mask=mask_lane)
        tl.store(path_ptr + rows * num_steps + step + 1, lane.to(tl.int32), mask=mask_lane)
    _end_step(step_ptr, step)


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


def _expand_tree(lanes: Lanes, topk_p_BKK, topk_index_BKK, hidden_BKH, config: SpecConfig) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    num_steps, places = config.num_steps, triton.next_power_of_2(k)
    block = _hidden_block(hidden_size, min(1024, max(1, 8192 // places)))
    requests = block_of(batch_size, 1, places * max(places**3 if places <= 8 else places, block, num_steps))
    _expand_kernel[(triton.cdiv(batch_size, requests), triton.cdiv(hidden_size, block))](
        topk_p_BKK, topk_index_BKK, hidden_BKH, *lanes.buffers, batch_size, k, num_steps,
        LOG=config.score == "logprob", ANCESTOR=config.draft_kv == "ancestor", REQUESTS=requests, LANES=places,
        STEPS=triton.next_power_of_2(num_steps), HIDDEN=hidden_size, BLOCK=block, num_warps=1 if places <= 32 else 4,
    )  # fmt: skip


def _expand_lanes(lanes: Lanes, topk_p_BK1, topk_index_BK1, hidden_BKH, config: SpecConfig) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    block, num_lanes = _hidden_block(hidden_size), batch_size * k
    rows = block_of(num_lanes, 4, block)
    _expand_lanes_kernel[(triton.cdiv(num_lanes, rows), triton.cdiv(hidden_size, block))](
        topk_p_BK1, topk_index_BK1, hidden_BKH, *lanes.buffers, num_lanes, k, config.num_steps,
        LOG=config.score == "logprob", ROWS=rows, HIDDEN=hidden_size, BLOCK=block,
    )  # fmt: skip


@triton.jit
def selected(scores, mask, count):
    """Of scores [ROWS, BLOCK]: (which are a row's `count` best, how many of these stand before each).

    A bound is raised two bits at a time until `count` reach it, or else it is the count-th best; kept is what is above
    it, and of its equals the first. Three counts share a word of 64 bits, so that they are one sum.
    """
    rank = tl.where(mask, ordered(scores), -0x80000000)  # no number's rank is that low
    bound = tl.full([scores.shape[0], 1], -0x80000000, tl.int64)
    reached, shift = tl.full([scores.shape[0], 1], -1, tl.int64), 30
    while (shift >= 0) & (tl.max(tl.max((reached != count).to(tl.int32), axis=1), axis=0) > 0):
        unit, counts = tl.full((), 1, tl.int64) << shift, tl.zeros(rank.shape, tl.int64)
        for part in tl.static_range(1, 4):
            raised = (bound + part * unit).to(tl.int32)
            counts += (rank >= raised).to(tl.int64) << (20 * part - 20)
        sums, lower = tl.sum(counts, axis=1, keep_dims=True), bound
        for part in tl.static_range(1, 4):
            reaching = (sums >> (20 * part - 20)) & 0xFFFFF
            bound = tl.where(reaching >= count, lower + part * unit, bound)
            reached = tl.where(reaching >= count, reaching, reached)
        shift -= 2
    above, equal = rank > bound.to(tl.int32), (rank == bound.to(tl.int32)) & mask
    counted = tl.cumsum((above.to(tl.int64) << 32) | equal.to(tl.int64), axis=1)  # of both at once
    missing = count - tl.sum(above.to(tl.int32), axis=1, keep_dims=True)
    equals = (counted & 0xFFFFFFFF).to(tl.int32)
    kept = above | (equal & (equals <= missing))
    return kept, (counted >> 32).to(tl.int32) + tl.minimum(equals, missing) - kept.to(tl.int32)


@kernel
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
    block = triton.next_power_of_2(max(num_candidates, 1))
    rows = block_of(num_rows, 1, block)
    _select_kernel[(triton.cdiv(num_rows, rows),)](
        scores, out, num_rows, num_candidates, count, ROWS=rows, BLOCK=block, num_warps=4 if block <= 2048 else 16
    )
    return out


def _hidden_block(hidden_size: int, on_gpu: int = _HIDDEN_BLOCK) -> int:
    return min(triton.next_power_of_2(hidden_size), block_of(hidden_size, on_gpu))
