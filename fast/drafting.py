"""EAGLE-2's dynamic tree (arXiv 2406.16858): K lanes expanded step by step, then the N-1 best candidates.

Every choice ranks a 64-bit key, the value above the index counted down: no two keys are equal, and of equal values the
lower index is the larger key. NaN ranks above every number, so that junk is ordered too.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from specsim.config import SpecConfig
from specsim.fast.launch import await_input, block_of, kernel, require_contiguous
from specsim.phases import Candidates, DraftInput, State

_VOCABULARY_BLOCK = 4096
_HIDDEN_BLOCK = 256
_TAKEN = tl.constexpr(-0x8000000000000000)  # below every key


@triton.jit
def ordered(values):
    """i32 that order as f32 values do; -0 equals 0, and NaN is the largest."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _key(values, index):
    return (ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _best(keys, k, PLACES: tl.constexpr):
    """The k largest keys of each row, largest first, [ROWS, PLACES]."""
    place = tl.arange(0, PLACES)[None, :]
    best = tl.full([keys.shape[0], PLACES], _TAKEN, tl.int64)
    for taken in range(k):
        largest = tl.max(keys, axis=1, keep_dims=True)
        best = tl.where(place == taken, largest, best)
        keys = tl.where(keys == largest, _TAKEN, keys)
    return best


@kernel
def _chunk_topk_kernel(
    logits_ptr, keys_ptr, sums_ptr, num_rows, vocab_size, num_chunks, k, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """keys [R, C, k], sums [R, C]: the k best of a chunk of the vocabulary, and Σ exp(logit - the chunk's best)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (ids < vocab_size)
    logits = tl.load(logits_ptr + rows * vocab_size + ids, mask=mask, other=-float("inf")).to(tl.float32)
    keys = _key(logits, ids)
    largest = _value(tl.max(keys, axis=1, keep_dims=True))
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    own = rows * num_chunks + chunk
    tl.store(sums_ptr + own, tl.sum(tl.exp(logits - largest), axis=1, keep_dims=True), mask=rows < num_rows)
    place = tl.arange(0, PLACES)[None, :]
    tl.store(keys_ptr + own * k + place, _best(keys, k, PLACES), mask=(rows < num_rows) & (place < k))


@kernel
def _merge_topk_kernel(
    keys_ptr, sums_ptr, d2t_ptr, slots_ptr, topk_p_ptr, topk_index_ptr, num_rows, num_chunks, k, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The k best of all chunks' best, with probabilities under the whole row's normaliser and as target ids."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask_rows = rows < num_rows
    chunks, entries = tl.arange(0, CHUNKS)[None, :], tl.arange(0, BLOCK)[None, :]
    mask_chunks = mask_rows & (chunks < num_chunks)
    own = rows * num_chunks + chunks
    mask = mask_rows & (entries < num_chunks * k)
    keys = tl.load(keys_ptr + rows * num_chunks * k + entries, mask=mask, other=_TAKEN)
    largest = _value(tl.max(keys, axis=1, keep_dims=True))
    chunk_largest = _value(tl.load(keys_ptr + own * k, mask=mask_chunks, other=0))
    sums = tl.load(sums_ptr + own, mask=mask_chunks, other=0.0)
    shift = tl.where(mask_chunks & (chunk_largest != -float("inf")), chunk_largest - largest, 0.0)
    total = tl.sum(sums * tl.exp(shift), axis=1, keep_dims=True)
    live = mask_rows
    if slots_ptr is not None:
        live = tl.load(slots_ptr + rows, mask=mask_rows, other=-1) >= 0
    place = tl.arange(0, PLACES)[None, :]
    mask, best = mask_rows & (place < k), _best(keys, k, PLACES)
    target_ids = _index(best)
    if d2t_ptr is not None:
        target_ids += tl.load(d2t_ptr + target_ids, mask=mask & live, other=0)
    prob = tl.exp(_value(best) - largest) / total
    tl.store(topk_p_ptr + rows * k + place, tl.where(live, prob, 0.0), mask=mask)
    tl.store(topk_index_ptr + rows * k + place, tl.where(live, target_ids, place), mask=mask)


def draft_topk(
    logits_RV: torch.Tensor,
    k: int,
    d2t: torch.Tensor | None,
    slots_R: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selection, softmax and the map to target ids in one reading of the logits: (topk_p f32, target ids i64), [R, K].

    A row whose slot is -1 proposes ids 0..K-1 with probability 0.
    """
    num_rows, vocab_size = logits_RV.shape
    if k > vocab_size:
        raise ValueError(f"topk is {k}, more than the {vocab_size} ids of the draft vocabulary")
    require_contiguous(logits_RV=logits_RV, d2t=d2t, slots_R=slots_R)
    places = triton.next_power_of_2(k)
    block = min(triton.next_power_of_2(vocab_size), max(_VOCABULARY_BLOCK, places))
    num_chunks, device = triton.cdiv(vocab_size, block), logits_RV.device
    rows = block_of(num_rows, 1, max(block, num_chunks * k))
    keys = torch.empty(num_rows, num_chunks, k, dtype=torch.int64, device=device)
    sums = torch.empty(num_rows, num_chunks, device=device)
    topk_p, topk_index = out or (
        torch.empty(num_rows, k, device=device),
        torch.empty(num_rows, k, dtype=torch.int64, device=device),
    )
    row_blocks = triton.cdiv(num_rows, rows)
    _chunk_topk_kernel[(row_blocks, num_chunks)](
        logits_RV, keys, sums, num_rows, vocab_size, num_chunks, k, ROWS=rows, BLOCK=block, PLACES=places
    )
    _merge_topk_kernel[(row_blocks,)](
        keys, sums, d2t, slots_R, topk_p, topk_index, num_rows, num_chunks, k, ROWS=rows,
        CHUNKS=triton.next_power_of_2(num_chunks), BLOCK=triton.next_power_of_2(num_chunks * k), PLACES=places,
    )  # fmt: skip
    return topk_p, topk_index


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
        cls, batch_size: int, hidden_size: int, config: SpecConfig, dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        """Buffers with nothing in them; `start_lanes` begins a draft phase."""
        k, num_steps = config.topk, config.num_steps

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            step=buffer(2, dtype=torch.int32),
            tokens=buffer(batch_size, k),
            path=buffer(batch_size, k, num_steps, dtype=torch.int32),
            hidden=buffer(batch_size, k, hidden_size, dtype=dtype),
            candidates=Candidates(
                tokens=buffer(batch_size, config.num_candidates),
                scores=buffer(batch_size, config.num_candidates, dtype=torch.float32),
                parent_list=buffer(batch_size, max(1, k * (num_steps - 1) + 1)),
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
    scores_ptr, parent_list_ptr, num_lanes, k, num_steps, LOG: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
        candidate = request * (k + (num_steps - 1) * k * k) + lane
        tl.store(tokens_ptr + candidate, tokens, mask=mask)
        tl.store(scores_ptr + candidate, scores, mask=mask)
        steps = tl.arange(0, STEPS)[None, :]
        held_by = tl.where(steps == 0, lane, -1).to(tl.int32)
        tl.store(path_ptr + rows * num_steps + steps, held_by, mask=mask & (steps < num_steps))
        block = request * (k * (num_steps - 1) + 1)
        tl.store(parent_list_ptr + block, -1, mask=mask & (lane == 0))
        tl.store(parent_list_ptr + block + 1 + lane, lane, mask=mask & (num_steps > 1))


def start_lanes(draft_input: DraftInput, lanes: Lanes, config: SpecConfig) -> None:
    """Step 0: the root's children are the lanes, each with the hidden state they came from."""
    batch_size, k, hidden_size = lanes.hidden.shape
    require_contiguous(topk_p=draft_input.topk_p, topk_index=draft_input.topk_index, hidden=draft_input.hidden)
    block = _hidden_block(hidden_size)
    rows = block_of(batch_size * k, 16, max(block, config.num_steps))
    _start_kernel[(triton.cdiv(batch_size * k, rows), triton.cdiv(hidden_size, block))](
        draft_input.topk_p, draft_input.topk_index, draft_input.hidden, *lanes.buffers, batch_size * k, k,
        config.num_steps, LOG=config.score == "logprob", ROWS=rows, STEPS=triton.next_power_of_2(config.num_steps),
        HIDDEN=hidden_size, BLOCK=block,
    )  # fmt: skip


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
            chosen = _index(_best(tl.where(mask, _key(scores, child), _TAKEN), k, LANES))
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
def _expand_chain_kernel(
    topk_p_ptr, topk_index_ptr, hidden_ptr, step_ptr, lane_tokens_ptr, path_ptr, lane_hidden_ptr, tokens_ptr,
    scores_ptr, parent_list_ptr, batch_size, num_steps, LOG: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One child a step: nothing to choose and nothing to re-parent."""
    await_input(PDL)
    step = tl.load(step_ptr)
    request = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask = (request < batch_size) & (step < num_steps - 1)
    mask_lane = mask & (step < num_steps - 2)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_hidden = mask_lane & (offs < HIDDEN)
    hidden = tl.load(hidden_ptr + request * HIDDEN + offs, mask=mask_hidden)
    tl.store(lane_hidden_ptr + request * HIDDEN + offs, hidden, mask=mask_hidden)
    if tl.program_id(1) == 0:
        tokens, candidate = tl.load(topk_index_ptr + request, mask=mask), request * num_steps + step + 1
        scores = tl.load(scores_ptr + candidate - 1, mask=mask, other=0.0)
        scores = _extended(scores, tl.load(topk_p_ptr + request, mask=mask, other=0.0), LOG)
        tl.store(tokens_ptr + candidate, tokens, mask=mask)
        tl.store(scores_ptr + candidate, scores, mask=mask)
        tl.store(lane_tokens_ptr + request, tokens, mask=mask_lane)
        tl.store(parent_list_ptr + candidate + 1, step + 1, mask=mask_lane)
        tl.store(path_ptr + candidate, 0, mask=mask_lane)
    _end_step(step_ptr, step)


def expand(
    lanes: Lanes,
    topk_p_BKK: torch.Tensor,
    topk_index_BKK: torch.Tensor,
    hidden_BKH: torch.Tensor,
    config: SpecConfig,
) -> None:
    """The lanes' children as candidates and the K best of them as lanes; the same launches at every step.

    Which step it is, and whether it is the last, after which no lane changes, is read from lanes.step on the device.
    """
    require_contiguous(topk_p_BKK=topk_p_BKK, topk_index_BKK=topk_index_BKK, hidden_BKH=hidden_BKH)
    advance = _expand_chain if config.topk == 1 else _expand_tree
    advance(lanes, topk_p_BKK, topk_index_BKK, hidden_BKH, config)


def _expand_tree(lanes: Lanes, topk_p_BKK, topk_index_BKK, hidden_BKH, config: SpecConfig) -> None:
    batch_size, k, hidden_size = lanes.hidden.shape
    num_steps, block, places = config.num_steps, _hidden_block(hidden_size), triton.next_power_of_2(k)
    requests = block_of(batch_size, 1, places * max(places, block, num_steps))
    _expand_kernel[(triton.cdiv(batch_size, requests), triton.cdiv(hidden_size, block))](
        topk_p_BKK, topk_index_BKK, hidden_BKH, *lanes.buffers, batch_size, k, num_steps,
        LOG=config.score == "logprob", ANCESTOR=config.draft_kv == "ancestor", REQUESTS=requests, LANES=places,
        STEPS=triton.next_power_of_2(num_steps), HIDDEN=hidden_size, BLOCK=block,
    )  # fmt: skip


def _expand_chain(lanes: Lanes, topk_p_BKK, topk_index_BKK, hidden_BKH, config: SpecConfig) -> None:
    batch_size, _, hidden_size = lanes.hidden.shape
    block = _hidden_block(hidden_size)
    requests = block_of(batch_size, 4, block)
    _expand_chain_kernel[(triton.cdiv(batch_size, requests), triton.cdiv(hidden_size, block))](
        topk_p_BKK, topk_index_BKK, hidden_BKH, *lanes.buffers, batch_size, config.num_steps,
        LOG=config.score == "logprob", ROWS=requests, HIDDEN=hidden_size, BLOCK=block,
    )  # fmt: skip


@triton.jit
def selected(scores, mask, count):
    """Of scores [ROWS, BLOCK]: (which are a row's `count` best, how many of these stand before each).

    The count-th best is found two bits at a time; kept is what is above it, and of its equals the first.
    """
    rank = tl.where(mask, ordered(scores), -0x80000000)  # no number's rank is that low
    threshold = tl.full([scores.shape[0], 1], -0x80000000, tl.int64)
    for digit in range(16):
        unit, lower = tl.full((), 1, tl.int64) << (30 - 2 * digit), threshold
        for part in tl.static_range(1, 4):
            raised = lower + part * unit
            reached = tl.sum((rank >= raised.to(tl.int32)).to(tl.int32), axis=1, keep_dims=True)
            threshold = tl.where(reached >= count, raised, threshold)
    above, equal = rank > threshold.to(tl.int32), (rank == threshold.to(tl.int32)) & mask
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


def select(scores: torch.Tensor, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
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


def _hidden_block(hidden_size: int) -> int:
    return min(triton.next_power_of_2(hidden_size), block_of(hidden_size, _HIDDEN_BLOCK))
