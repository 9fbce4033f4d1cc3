"""Lanes of a draft phase: paths that each step extends by one token, and the keys that they see."""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, ExplicitCandidates, State
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import WORD, AttentionMetadata, equal_rows, slot_of, store_rows
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous

_HIDDEN_BLOCK = 256


class LaneTables(NamedTuple):
    """Lanes as kernel arguments."""

    step_ptr: torch.Tensor
    lane_tokens_ptr: torch.Tensor
    path_ptr: torch.Tensor
    hidden_ptr: torch.Tensor
    tokens_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    parent_list_ptr: torch.Tensor


@dataclass(frozen=True, slots=True)
class CandidateBuffers(State):
    """Buffers of a draft phase that leaves nothing but candidates."""

    candidates: Candidates | ExplicitCandidates

    @property
    def explicit(self) -> ExplicitCandidates:
        """The candidates of a drafter that gives each its parent."""
        if not isinstance(self.candidates, ExplicitCandidates):
            raise TypeError("the candidates have no explicit parents")
        return self.candidates


@dataclass(frozen=True, slots=True)
class Lanes(State):
    """Buffers of the draft loop, which every step changes in place."""

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
        """Allocate buffers, which `start_lanes` fills.

        vocab_size: of draft distributions.
        """
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

    @classmethod
    def padded(cls, size: int, hidden_size: int, config: SpecConfig, dtype: torch.dtype, vocab_size: int) -> Self:
        """Make lanes of padded requests on the host, as earlier steps would leave them for a captured step."""
        lanes = cls.empty(size, hidden_size, config, dtype, "cpu", vocab_size)
        for buffer in lanes.tables:
            buffer.zero_()
        lanes.candidates.parent_list.fill_(-1)
        return lanes

    @property
    def tables(self) -> LaneTables:
        grown = self.candidates
        return LaneTables(self.step, self.tokens, self.path, self.hidden, grown.tokens, grown.scores, grown.parent_list)


def hidden_block(hidden_size: int, on_gpu: int = _HIDDEN_BLOCK) -> int:
    """Count the entries of the hidden state that one program copies."""
    return min(next_power_of_2(hidden_size), block_of(hidden_size, on_gpu))


@kernel
@no_type_check
def _start_kernel(
    topk_scores_ptr,
    topk_index_ptr,
    hidden_ptr,
    lane_ptrs,
    num_lanes,
    num_candidates,
    k,
    num_steps,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Start the lanes of all requests.

    Programs of one row block share the copy of the hidden state.
    """
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
        scores = tl.load(topk_scores_ptr + rows, mask=mask)
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


def start_lanes(draft_input: AutoregressiveInput, config: SpecConfig, *, out: Lanes | None = None) -> Lanes:
    """Start with the root's children as lanes, each with the root's hidden state and distribution."""
    hidden = draft_input.hidden
    draft_prob = draft_input.draft_prob
    if config.has_draft_prob and draft_prob is None:
        raise ValueError("the draft input has no draft_prob, which this setting's verifier reads")
    require_contiguous(topk_scores=draft_input.topk_scores, topk_index=draft_input.topk_index, hidden=hidden)
    batch_size, hidden_size = hidden.shape
    k = config.topk
    vocab_size = 0 if draft_prob is None else draft_prob.shape[1]
    lanes = out or Lanes.empty(batch_size, hidden_size, config, hidden.dtype, hidden.device, vocab_size)
    block = hidden_block(hidden_size)
    rows = block_of(batch_size * k, 16, max(block, config.num_steps))
    _start_kernel[(ceil_div(batch_size * k, rows), ceil_div(hidden_size, block))](
        topk_scores_ptr=draft_input.topk_scores,
        topk_index_ptr=draft_input.topk_index,
        hidden_ptr=hidden,
        lane_ptrs=lanes.tables,
        num_lanes=batch_size * k,
        num_candidates=config.num_candidates,
        k=k,
        num_steps=config.num_steps,
        ROWS=rows,
        STEPS=next_power_of_2(config.num_steps),
        HIDDEN=hidden_size,
        BLOCK=block,
    )
    if lanes.candidates.draft_prob is not None and draft_prob is not None:
        lanes.candidates.draft_prob[:, 0].copy_(draft_prob)
    return lanes


@triton.jit
@no_type_check
def lane_column(seq_len, lane, step, num_steps, page_size):
    """Compute the column in which a lane writes its KV of a step.

    Steps -tail..-1 are its copy of the prefix's unfinished page. page_size: 1 where lanes share the prefix.
    """
    pages = (seq_len % page_size + num_steps + page_size - 1) // page_size
    return seq_len + lane * pages * page_size + step


@kernel
@no_type_check
def _lane_kernel(
    metadata_ptrs,
    slots_ptr,
    step_ptr,
    path_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    num_requests,
    num_lanes,
    num_steps,
    page_size,
    max_len,
    columns,
    bonus_columns,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the metadata of draft lanes: a program takes some rows and some words of their visibility."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)  # [BLOCK_R]
    mask = offs < num_requests * num_lanes
    request = offs // num_lanes
    lane = offs % num_lanes
    step = tl.load(step_ptr)
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    length = tl.load(lens_ptr + request, mask=mask, other=0) + bonus_columns  # columns of the drafter's prefix
    column = lane_column(length, lane, step, num_steps, page_size)
    slot = slot_of(table_ptr, columns, row, column, mask=(row >= 0) & (length + step < max_len))
    live = slot >= 0
    tail = length % page_size
    num_extras = num_lanes * (tail + step + 1)
    if tl.program_id(1) == 0:
        tl.store(slots_ptr + offs, slot, mask=mask)
        store_rows(
            metadata_ptrs,
            offs,
            num_lanes,
            position=tl.where(live, length + step, 0),
            prefix_len=tl.where(live, length - tail, 0),
            key_len=tl.where(row >= 0, length - tail, 0),
            num_extras=tl.where(row >= 0, num_extras, 0),
            mask=mask,
        )
    # Extra keys: every lane's copy of the tail, lane after lane, then every step's tokens, step after step.
    most = num_lanes * (page_size - 1 + num_steps)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, WORD)[None, None, :]
    extra = word[None, :, None] * WORD + bit  # [1, BLOCK_W, WORD]
    later = extra - (num_lanes * tail)[:, None, None]  # [BLOCK_R, BLOCK_W, WORD]
    tail = tail[:, None, None]
    lane = lane[:, None, None]
    in_tail = later < 0
    holder = tl.where(in_tail, extra // tl.maximum(tail, 1), later % num_lanes)
    held_step = tl.where(in_tail, extra % tl.maximum(tail, 1) - tail, later // num_lanes)
    present = (row >= 0)[:, None, None] & (extra < num_extras[:, None, None])
    path_address = path_ptr + offs[:, None, None] * num_steps + held_step
    on_path = tl.load(path_address, mask=present & ~in_tail, other=-1) == holder
    seen = live[:, None, None] & present & tl.where(in_tail, holder == lane, on_path)
    num_words = (most + WORD - 1) // WORD
    mask_w = mask[:, None] & (word < num_words)[None, :]
    packed = tl.sum(seen.to(tl.int32) << bit, axis=2)  # [BLOCK_R, BLOCK_W]
    tl.store(metadata_ptrs.visible + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)
    first = mask[:, None, None] & (lane == 0) & (extra < most)  # [BLOCK_R, BLOCK_W, WORD]
    request = request[:, None, None]
    column = lane_column(length[:, None, None], holder, held_step, num_steps, page_size)
    held_slot = slot_of(table_ptr, columns, row[:, None, None], column, mask=first & present)
    tl.store(metadata_ptrs.extra_slots + request * most + extra, held_slot.to(tl.int32), mask=first)
    position = tl.where(present, length[:, None, None] + held_step, 0)
    tl.store(metadata_ptrs.extra_positions + request * most + extra, position.to(tl.int32), mask=first)


def lane_metadata(
    batch: Batch, lanes: Lanes, config: SpecConfig, pools: KVPool, bonus_columns: int = 0
) -> AttentionMetadata:
    """Make the metadata of draft step lanes.step, read on the device, with lanes at position L + bonus_columns + step.

    A lane sees the prefix, its own copy of the prefix's tail, and the tokens of its path, lanes.path.
    """
    page_size = 1 if config.lanes_share_prefix else config.page_size
    num_requests = len(batch.seq_lens)
    total = num_requests * config.topk
    extras = config.topk * (page_size - 1 + config.num_steps)
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    metadata = equal_rows(batch, slots, config.topk, extras, pools)
    block_w = block_of(metadata.visible.shape[1], 1, WORD.value)
    block_r = block_of(total, 16, WORD.value * block_w)
    _lane_kernel[ceil_div(total, block_r), ceil_div(metadata.visible.shape[1], block_w)](
        metadata_ptrs=metadata.tensors,
        slots_ptr=slots,
        step_ptr=lanes.step,
        path_ptr=lanes.path,
        table_ptr=pools.req_to_token,
        rows_ptr=batch.req_pool_indices,
        lens_ptr=batch.seq_lens,
        num_requests=num_requests,
        num_lanes=config.topk,
        num_steps=config.num_steps,
        page_size=page_size,
        max_len=config.max_len,
        columns=pools.req_to_token.shape[1],
        bonus_columns=bonus_columns,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
    )
    return metadata
