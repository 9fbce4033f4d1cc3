"""Attention metadata: the rows of one forward and the keys that they see, as tensors that kernels write."""

from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, VerifyInput
from specsim.core.pool import KVPool
from specsim.fast.lanes import Lanes
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel

WORD = tl.constexpr(32)  # visibility bits of one i32


class KVTensors(NamedTuple):
    """KV as kernels take it; `values` would be an attribute of Triton's own tuple."""

    keys_ptr: torch.Tensor
    values_ptr: torch.Tensor


class MetadataTensors(NamedTuple):
    """The tensors of AttentionMetadata that kernels of this module write and attention reads."""

    positions: torch.Tensor
    row_starts: torch.Tensor
    prefix_lens: torch.Tensor
    key_lens: torch.Tensor
    num_extras: torch.Tensor
    extra_slots: torch.Tensor
    extra_positions: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Rows, keys and visibility of one forward, request after request; made for every forward (vllm#41162).

    A request's keys are its prefix, of which a row sees the first prefix_lens, and its extra keys, of which a row sees
    those whose bit is set. Prefix key c stands at position c, in the slot of the table's column c, which has to be
    owned if a row sees it. An extra key without a slot is seen by no row.
    """

    positions: torch.Tensor  # i64 [R], 0 for a dropped row
    slots: torch.Tensor  # i64 [R], where a row writes its KV; -1 for a dropped row, which sees nothing
    row_starts: torch.Tensor  # i64 [B+1]
    max_rows: int  # most rows of a request
    has_equal_rows: bool  # every request has max_rows rows, in every batch of the phase
    table: torch.Tensor  # i64 [rows, columns], the pool's
    table_rows: torch.Tensor  # i64 [B], row of the table; -1 for a padded request
    prefix_lens: torch.Tensor  # i32 [R], prefix keys that a row sees
    # i32 [B], a bound on the prefix keys that a row of the request sees; unless is_causal every row but the dropped
    # sees just that many
    key_lens: torch.Tensor
    is_causal: bool
    num_extras: torch.Tensor  # i32 [B], extra keys of a request
    extra_slots: torch.Tensor  # i32 [B, E], -1 for none
    extra_positions: torch.Tensor  # i32 [B, E]
    visible: torch.Tensor  # i32 [R, E/32 rounded up], bit e % 32 of word e / 32: the row sees extra key e

    @property
    def tensors(self) -> MetadataTensors:
        """The tensors as kernels take them."""
        return MetadataTensors(*(getattr(self, name) for name in MetadataTensors._fields))


@triton.jit
@no_type_check
def lane_column(seq_len, lane, step, num_steps, page_size):
    """Column in which a lane writes its KV of a step; steps -tail..-1 are its copy of the prefix's unfinished page.

    page_size: 1 where lanes share the prefix.
    """
    pages = (seq_len % page_size + num_steps + page_size - 1) // page_size
    return seq_len + lane * pages * page_size + step


@kernel
@no_type_check
def _causal_kernel(
    metadata_ptrs,
    slots_ptr,
    start_lens_ptr,
    rows_ptr,
    num_requests,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Describe rows that see every column up to their own."""
    await_input(PDL)
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)[:, None]  # [BLOCK_B, 1]
    mask = request < num_requests
    start = tl.load(start_lens_ptr + request, mask=mask, other=0)
    low = tl.load(metadata_ptrs.row_starts + request, mask=mask, other=0)
    high = tl.load(metadata_ptrs.row_starts + request + 1, mask=mask, other=0)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    if tl.program_id(1) == 0:
        tl.store(metadata_ptrs.key_lens + request, tl.where(real, start + high - low, 0).to(tl.int32), mask=mask)
        tl.store(metadata_ptrs.num_extras + request, tl.zeros([BLOCK_B, 1], tl.int32), mask=mask)
    step = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[None, :]
    offs = low + step  # [BLOCK_B, BLOCK_R]
    column = start + step
    mask &= offs < high
    live = real & (tl.load(slots_ptr + offs, mask=mask, other=-1) >= 0)
    tl.store(metadata_ptrs.positions + offs, tl.where(live, column, 0), mask=mask)
    tl.store(metadata_ptrs.prefix_lens + offs, tl.where(live, column + 1, 0).to(tl.int32), mask=mask)


def _causal_metadata(
    rows_B: torch.Tensor,
    start_lens_B: torch.Tensor,
    row_starts: torch.Tensor,
    max_rows: int,
    has_equal_rows: bool,
    slots_R: torch.Tensor,
    pools: KVPool,
) -> AttentionMetadata:
    """Metadata of rows that see every column up to their own: row j of request b stands at start_lens[b] + j."""
    num_requests = len(rows_B)
    none = slots_R.new_empty(0, dtype=torch.int32)
    metadata = AttentionMetadata(
        positions=torch.empty_like(slots_R),
        slots=slots_R,
        row_starts=row_starts,
        max_rows=max_rows,
        has_equal_rows=has_equal_rows,
        table=pools.req_to_token,
        table_rows=rows_B,
        prefix_lens=torch.empty_like(slots_R, dtype=torch.int32),
        key_lens=none.new_empty(num_requests),
        is_causal=True,
        num_extras=none.new_empty(num_requests),
        extra_slots=none.view(num_requests, 0),
        extra_positions=none.view(num_requests, 0),
        visible=none.view(len(slots_R), 0),
    )
    block_r = block_of(max_rows, 256)
    block_b = block_of(num_requests, 1, block_r)
    _causal_kernel[ceil_div(num_requests, block_b), ceil_div(max_rows, block_r)](
        metadata_ptrs=metadata.tensors,
        slots_ptr=slots_R,
        start_lens_ptr=start_lens_B,
        rows_ptr=rows_B,
        num_requests=num_requests,
        BLOCK_B=block_b,
        BLOCK_R=block_r,
    )
    return metadata


def prefill_metadata(batch: Batch, prefill: PrefillInput, pools: KVPool) -> AttentionMetadata:
    """Metadata of prefill, of the target and of the drafter: every column of the chunk is owned. Not in graphs."""
    slots = pools.slots(batch.req_pool_indices[prefill.requests], prefill.columns)
    max_rows = max(prefill.row_starts.diff().tolist(), default=0)
    return _causal_metadata(
        batch.req_pool_indices, prefill.start_lens, prefill.row_starts, max_rows, False, slots, pools
    )


def extend_metadata(batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AttentionMetadata:
    """Metadata of draft-extend: equally many rows a request, those without a slot last."""
    extend = draft_extend_input
    max_rows = len(extend.input_ids) // max(batch.size, 1)
    return _causal_metadata(
        extend.req_pool_indices, extend.seq_lens, extend.row_starts, max_rows, True, extend.cache_locations, pools
    )


@triton.jit
@no_type_check
def _store_starts(row_starts_ptr, offs, rows_per_request, mask):
    """Store row_starts of requests that have equally many rows."""
    tl.store(row_starts_ptr + offs // rows_per_request, offs, mask=mask & (offs % rows_per_request == 0))
    end = offs + 1
    tl.store(row_starts_ptr + end // rows_per_request, end, mask=mask & (end % rows_per_request == 0))


@kernel
@no_type_check
def _tree_kernel(
    metadata_ptrs,
    slots_ptr,
    rows_ptr,
    lens_ptr,
    node_positions_ptr,
    mask_ptr,
    num_requests,
    num_nodes,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Describe nodes of trees: a program takes some rows and some words of their visibility."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)  # [BLOCK_R]
    mask = offs < num_requests * num_nodes
    request = offs // num_nodes
    node = offs % num_nodes
    slot = tl.load(slots_ptr + offs, mask=mask, other=-1)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    live = real & (slot >= 0)
    if tl.program_id(1) == 0:
        position = tl.load(node_positions_ptr + offs, mask=live, other=0)
        length = tl.load(lens_ptr + request, mask=real & mask, other=0).to(tl.int32)
        tl.store(metadata_ptrs.positions + offs, position, mask=mask)
        tl.store(metadata_ptrs.prefix_lens + offs, tl.where(live, length, 0), mask=mask)
        tl.store(metadata_ptrs.key_lens + request, length, mask=mask & (node == 0))
        tl.store(metadata_ptrs.extra_slots + offs, slot.to(tl.int32), mask=mask)
        tl.store(metadata_ptrs.extra_positions + offs, position.to(tl.int32), mask=mask)
        tl.store(metadata_ptrs.num_extras + request, tl.where(real, num_nodes, 0), mask=mask & (node == 0))
        _store_starts(metadata_ptrs.row_starts, offs, num_nodes, mask)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, WORD)[None, None, :]
    other = word[None, :, None] * WORD + bit  # [1, BLOCK_W, WORD]
    mask_seen = live[:, None, None] & (other < num_nodes)  # [BLOCK_R, BLOCK_W, WORD]
    seen = tl.load(mask_ptr + offs[:, None, None] * num_nodes + other, mask=mask_seen, other=0)
    num_words = (num_nodes + WORD - 1) // WORD
    packed = tl.sum((seen != 0).to(tl.int32) << bit, axis=2)  # [BLOCK_R, BLOCK_W]
    mask_w = mask[:, None] & (word < num_words)[None, :]
    tl.store(metadata_ptrs.visible + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)


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
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Describe draft lanes: a program takes some rows and some words of their visibility."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)  # [BLOCK_R]
    mask = offs < num_requests * num_lanes
    request = offs // num_lanes
    lane = offs % num_lanes
    step = tl.load(step_ptr)
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    length = tl.load(lens_ptr + request, mask=mask, other=0)
    column = lane_column(length, lane, step, num_steps, page_size)
    kept = (row >= 0) & (length + step < max_len) & (column < columns)
    slot = tl.load(table_ptr + row * columns + column, mask=kept, other=-1)
    live = slot >= 0
    tail = length % page_size
    num_extras = num_lanes * (tail + step + 1)
    if tl.program_id(1) == 0:
        tl.store(metadata_ptrs.positions + offs, tl.where(live, length + step, 0), mask=mask)
        tl.store(slots_ptr + offs, slot, mask=mask)
        prefix_len = tl.where(row >= 0, length - tail, 0).to(tl.int32)
        tl.store(metadata_ptrs.prefix_lens + offs, tl.where(live, prefix_len, 0), mask=mask)
        tl.store(metadata_ptrs.key_lens + request, prefix_len, mask=mask & (lane == 0))
        own_extras = tl.where(row >= 0, num_extras, 0).to(tl.int32)
        tl.store(metadata_ptrs.num_extras + request, own_extras, mask=mask & (lane == 0))
        _store_starts(metadata_ptrs.row_starts, offs, num_lanes, mask)
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
    slot_address = table_ptr + row[:, None, None] * columns + column
    held_slot = tl.load(slot_address, mask=first & present & (column < columns), other=-1)
    tl.store(metadata_ptrs.extra_slots + request * most + extra, held_slot.to(tl.int32), mask=first)
    position = tl.where(present, length[:, None, None] + held_step, 0)
    tl.store(metadata_ptrs.extra_positions + request * most + extra, position.to(tl.int32), mask=first)


def _equal_rows(batch: Batch, slots: torch.Tensor, rows: int, extras: int, pools: KVPool) -> AttentionMetadata:
    """Metadata of requests with equally many rows, still to be written."""
    total = batch.size * rows
    device = batch.seq_lens.device

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return AttentionMetadata(
        positions=new(total, dtype=torch.int64),
        slots=slots,
        row_starts=new(batch.size + 1, dtype=torch.int64),
        max_rows=rows,
        has_equal_rows=True,
        table=pools.req_to_token,
        table_rows=batch.req_pool_indices,
        prefix_lens=new(total),
        key_lens=new(batch.size),
        is_causal=False,
        num_extras=new(batch.size),
        extra_slots=new(batch.size, extras),
        extra_positions=new(batch.size, extras),
        visible=new(total, ceil_div(extras, WORD.value)),
    )


def tree_metadata(batch: Batch, verify_input: VerifyInput, pools: KVPool) -> AttentionMetadata:
    """Metadata of verify: a node sees the prefix, and the nodes that its mask row names."""
    num_nodes = verify_input.draft_tokens.shape[1]
    slots = verify_input.cache_locations
    metadata = _equal_rows(batch, slots, num_nodes, num_nodes, pools)
    block_w = block_of(metadata.visible.shape[1], 1, WORD.value)
    block_r = block_of(len(slots), 16, WORD.value * block_w)
    _tree_kernel[ceil_div(len(slots), block_r), ceil_div(metadata.visible.shape[1], block_w)](
        metadata_ptrs=metadata.tensors,
        slots_ptr=slots,
        rows_ptr=batch.req_pool_indices,
        lens_ptr=batch.seq_lens,
        node_positions_ptr=verify_input.positions,
        mask_ptr=verify_input.mask,
        num_requests=batch.size,
        num_nodes=num_nodes,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
    )
    return metadata


def lane_metadata(batch: Batch, lanes: Lanes, config: SpecConfig, pools: KVPool) -> AttentionMetadata:
    """Metadata of draft step lanes.step, read on the device: lane k of request b stands at position L + step.

    A lane sees the prefix, its tail in the lane's own copy, and the tokens of its path, lanes.path.
    """
    page_size = 1 if config.lanes_share_prefix else config.page_size
    total = batch.size * config.topk
    extras = config.topk * (page_size - 1 + config.num_steps)
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    metadata = _equal_rows(batch, slots, config.topk, extras, pools)
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
        num_requests=batch.size,
        num_lanes=config.topk,
        num_steps=config.num_steps,
        page_size=page_size,
        max_len=config.max_len,
        columns=pools.req_to_token.shape[1],
        BLOCK_R=block_r,
        BLOCK_W=block_w,
    )
    return metadata
