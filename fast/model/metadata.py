"""Who attends to what in one forward, as tensors that kernels build."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, VerifyInput
from specsim.core.pool import KVPool
from specsim.fast.drafting import Lanes
from specsim.fast.runtime.launch import await_input, block_of, kernel

WORD = tl.constexpr(32)  # visibility bits of one i32


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One forward over R rows, request after request; built anew for every forward (vllm#41162).

    A request's keys are its prefix, of which a row sees the first so many, and its extra keys, of which a row sees
    those whose bit is set. Prefix key c stands at position c, in the slot of the table's column c, which has to be
    owned if a row sees it. An extra key without a slot is seen by nobody.

    positions: i64 [R], 0 for a dropped row. slots: i64 [R], where a row writes its KV, -1 for a dropped row, which sees
    nothing. row_starts: i64 [B+1]; max_rows: most rows of a request, and if has_equal_rows those of every one, in every
    batch of the phase. table: i64 [rows, columns], the pool's; table_rows: i64 [B], -1 for a padded request.
    prefix_lens: i32 [R], prefix keys that a row sees; key_lens: i32 [B], at most so many are seen by a row of the
    request, and unless is_causal by every row but the dropped.
    extra_slots, extra_positions: i32 [B, E], a slot is -1 for none; num_extras: i32 [B], how many of these there are.
    visible: i32 [R, E/32 rounded up], bit e % 32 of word e / 32 says whether extra key e is seen.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    row_starts: torch.Tensor
    max_rows: int
    has_equal_rows: bool
    table: torch.Tensor
    table_rows: torch.Tensor
    prefix_lens: torch.Tensor
    key_lens: torch.Tensor
    is_causal: bool
    num_extras: torch.Tensor
    extra_slots: torch.Tensor
    extra_positions: torch.Tensor
    visible: torch.Tensor


@triton.jit
def lane_column(seq_len, lane, step, num_steps, page_size):
    """Column in which a lane writes its KV of a step; steps -tail..-1 are its copy of the prefix's unfinished page.

    page_size: 1 where lanes share the prefix.
    """
    pages = (seq_len % page_size + num_steps + page_size - 1) // page_size
    return seq_len + lane * pages * page_size + step


@kernel
def _causal_kernel(
    positions_ptr, prefix_lens_ptr, key_lens_ptr, num_extras_ptr, slots_ptr, row_starts_ptr, start_lens_ptr, rows_ptr,
    num_requests, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_input(PDL)
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)[:, None]
    mask = request < num_requests
    start = tl.load(start_lens_ptr + request, mask=mask, other=0)
    low = tl.load(row_starts_ptr + request, mask=mask, other=0)
    high = tl.load(row_starts_ptr + request + 1, mask=mask, other=0)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    if tl.program_id(1) == 0:
        tl.store(key_lens_ptr + request, tl.where(real, start + high - low, 0).to(tl.int32), mask=mask)
        tl.store(num_extras_ptr + request, tl.zeros([BLOCK_B, 1], tl.int32), mask=mask)
    step = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[None, :]
    offs, column = low + step, start + step
    mask &= offs < high
    live = real & (tl.load(slots_ptr + offs, mask=mask, other=-1) >= 0)
    tl.store(positions_ptr + offs, tl.where(live, column, 0), mask=mask)
    tl.store(prefix_lens_ptr + offs, tl.where(live, column + 1, 0).to(tl.int32), mask=mask)


def _causal_metadata(
    rows_B, start_lens_B, row_starts, max_rows: int, has_equal_rows: bool, slots_R, pools: KVPool
) -> AttentionMetadata:
    """Row j of request b stands at column start_lens[b] + j, writes to its slot and sees every column up to its own."""
    num_requests, none = len(rows_B), slots_R.new_empty(0, dtype=torch.int32)
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
    _causal_kernel[triton.cdiv(num_requests, block_b), triton.cdiv(max_rows, block_r)](
        metadata.positions, metadata.prefix_lens, metadata.key_lens, metadata.num_extras, slots_R, row_starts,
        start_lens_B, rows_B, num_requests, BLOCK_B=block_b, BLOCK_R=block_r,
    )  # fmt: skip
    return metadata


def prefill_metadata(batch: Batch, prefill: PrefillInput, pools: KVPool) -> AttentionMetadata:
    """Prefill, of the target and of the drafter: every column of the chunk has to be owned. Outside graphs."""
    slots = pools.slots(batch.req_pool_indices[prefill.requests], prefill.columns)
    max_rows = max(prefill.row_starts.diff().tolist(), default=0)
    return _causal_metadata(
        batch.req_pool_indices, prefill.start_lens, prefill.row_starts, max_rows, False, slots, pools
    )


def extend_metadata(batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AttentionMetadata:
    """Draft-extend: equally many rows a request; rows without a slot stand at the end of a request's."""
    extend = draft_extend_input
    max_rows = len(extend.input_ids) // max(batch.size, 1)
    return _causal_metadata(
        extend.req_pool_indices, extend.seq_lens, extend.row_starts, max_rows, True, extend.cache_locations, pools
    )


@triton.jit
def _store_starts(row_starts_ptr, offs, rows_per_request, mask):
    """row_starts of requests that have equally many rows."""
    tl.store(row_starts_ptr + offs // rows_per_request, offs, mask=mask & (offs % rows_per_request == 0))
    end = offs + 1
    tl.store(row_starts_ptr + end // rows_per_request, end, mask=mask & (end % rows_per_request == 0))


@kernel
def _tree_kernel(
    positions_ptr, row_starts_ptr, prefix_lens_ptr, key_lens_ptr, num_extras_ptr, extra_slots_ptr, extra_positions_ptr,
    visible_ptr, slots_ptr, rows_ptr, lens_ptr, node_positions_ptr, mask_ptr, num_requests, num_nodes,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mask = offs < num_requests * num_nodes
    request, node = offs // num_nodes, offs % num_nodes
    slot = tl.load(slots_ptr + offs, mask=mask, other=-1)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    live = real & (slot >= 0)
    if tl.program_id(1) == 0:
        position = tl.load(node_positions_ptr + offs, mask=live, other=0)
        length = tl.load(lens_ptr + request, mask=real & mask, other=0).to(tl.int32)
        tl.store(positions_ptr + offs, position, mask=mask)
        tl.store(prefix_lens_ptr + offs, tl.where(live, length, 0), mask=mask)
        tl.store(key_lens_ptr + request, length, mask=mask & (node == 0))
        tl.store(extra_slots_ptr + offs, slot.to(tl.int32), mask=mask)
        tl.store(extra_positions_ptr + offs, position.to(tl.int32), mask=mask)
        tl.store(num_extras_ptr + request, tl.where(real, num_nodes, 0), mask=mask & (node == 0))
        _store_starts(row_starts_ptr, offs, num_nodes, mask)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, WORD)[None, None, :]
    other = word[None, :, None] * WORD + bit
    seen = tl.load(
        mask_ptr + offs[:, None, None] * num_nodes + other, mask=live[:, None, None] & (other < num_nodes), other=0
    )
    num_words = (num_nodes + WORD - 1) // WORD
    packed = tl.sum((seen != 0).to(tl.int32) << bit, axis=2)
    mask_w = mask[:, None] & (word < num_words)[None, :]
    tl.store(visible_ptr + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)


@kernel
def _lane_kernel(
    positions_ptr, slots_ptr, row_starts_ptr, prefix_lens_ptr, key_lens_ptr, num_extras_ptr, extra_slots_ptr,
    extra_positions_ptr, visible_ptr, step_ptr, path_ptr, table_ptr, rows_ptr, lens_ptr,
    num_requests, num_lanes, num_steps, page_size, max_len, columns,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mask = offs < num_requests * num_lanes
    request, lane, step = offs // num_lanes, offs % num_lanes, tl.load(step_ptr)
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    length = tl.load(lens_ptr + request, mask=mask, other=0)
    column = lane_column(length, lane, step, num_steps, page_size)
    kept = (row >= 0) & (length + step < max_len) & (column < columns)
    slot = tl.load(table_ptr + row * columns + column, mask=kept, other=-1)
    live, tail = slot >= 0, length % page_size
    num_extras = num_lanes * (tail + step + 1)
    if tl.program_id(1) == 0:
        tl.store(positions_ptr + offs, tl.where(live, length + step, 0), mask=mask)
        tl.store(slots_ptr + offs, slot, mask=mask)
        prefix_len = tl.where(row >= 0, length - tail, 0).to(tl.int32)
        tl.store(prefix_lens_ptr + offs, tl.where(live, prefix_len, 0), mask=mask)
        tl.store(key_lens_ptr + request, prefix_len, mask=mask & (lane == 0))
        tl.store(num_extras_ptr + request, tl.where(row >= 0, num_extras, 0).to(tl.int32), mask=mask & (lane == 0))
        _store_starts(row_starts_ptr, offs, num_lanes, mask)
    # Extra keys: every lane's copy of the tail, lane after lane, then every step's tokens, step after step.
    most = num_lanes * (page_size - 1 + num_steps)
    word, bit = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, WORD)[None, None, :]
    extra = word[None, :, None] * WORD + bit
    lane, tail, later = lane[:, None, None], tail[:, None, None], extra - (num_lanes * tail)[:, None, None]
    in_tail = later < 0
    holder = tl.where(in_tail, extra // tl.maximum(tail, 1), later % num_lanes)
    held_step = tl.where(in_tail, extra % tl.maximum(tail, 1) - tail, later // num_lanes)
    present = (row >= 0)[:, None, None] & (extra < num_extras[:, None, None])
    path_address = path_ptr + offs[:, None, None] * num_steps + held_step
    on_path = tl.load(path_address, mask=present & ~in_tail, other=-1) == holder
    seen = live[:, None, None] & present & tl.where(in_tail, holder == lane, on_path)
    num_words = (most + WORD - 1) // WORD
    mask_w = mask[:, None] & (word < num_words)[None, :]
    packed = tl.sum(seen.to(tl.int32) << bit, axis=2)
    tl.store(visible_ptr + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)
    first, request = mask[:, None, None] & (lane == 0) & (extra < most), request[:, None, None]
    column = lane_column(length[:, None, None], holder, held_step, num_steps, page_size)
    slot_address = table_ptr + row[:, None, None] * columns + column
    held_slot = tl.load(slot_address, mask=first & present & (column < columns), other=-1)
    tl.store(extra_slots_ptr + request * most + extra, held_slot.to(tl.int32), mask=first)
    position = tl.where(present, length[:, None, None] + held_step, 0)
    tl.store(extra_positions_ptr + request * most + extra, position.to(tl.int32), mask=first)


def _equal_rows(batch: Batch, slots: torch.Tensor, rows: int, extras: int, pools: KVPool) -> AttentionMetadata:
    """Metadata of requests with equally many rows, to be written."""
    total, device = batch.size * rows, batch.seq_lens.device

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
        visible=new(total, triton.cdiv(extras, WORD.value)),
    )


def tree_metadata(batch: Batch, verify_input: VerifyInput, pools: KVPool) -> AttentionMetadata:
    """Verify: a node sees the prefix, and of the tree what its mask row says."""
    num_nodes, slots = verify_input.draft_tokens.shape[1], verify_input.cache_locations
    metadata = _equal_rows(batch, slots, num_nodes, num_nodes, pools)
    block_w = block_of(metadata.visible.shape[1], 1, WORD.value)
    block_r = block_of(len(slots), 16, WORD.value * block_w)
    _tree_kernel[triton.cdiv(len(slots), block_r), triton.cdiv(metadata.visible.shape[1], block_w)](
        metadata.positions, metadata.row_starts, metadata.prefix_lens, metadata.key_lens, metadata.num_extras,
        metadata.extra_slots, metadata.extra_positions, metadata.visible, slots, batch.req_pool_indices,
        batch.seq_lens, verify_input.positions, verify_input.mask, batch.size, num_nodes,
        BLOCK_R=block_r, BLOCK_W=block_w,
    )  # fmt: skip
    return metadata


def lane_metadata(batch: Batch, lanes: Lanes, config: SpecConfig, pools: KVPool) -> AttentionMetadata:
    """Draft step lanes.step, read on the device: lane k of request b stands at position L + step.

    A lane sees the prefix, its tail in the lane's own copy, and the tokens of its path, lanes.path.
    """
    page_size = 1 if config.lanes_share_prefix else config.page_size
    total, extras = batch.size * config.topk, config.topk * (page_size - 1 + config.num_steps)
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    metadata = _equal_rows(batch, slots, config.topk, extras, pools)
    block_w = block_of(metadata.visible.shape[1], 1, WORD.value)
    block_r = block_of(total, 16, WORD.value * block_w)
    _lane_kernel[triton.cdiv(total, block_r), triton.cdiv(metadata.visible.shape[1], block_w)](
        metadata.positions, slots, metadata.row_starts, metadata.prefix_lens, metadata.key_lens, metadata.num_extras,
        metadata.extra_slots, metadata.extra_positions, metadata.visible, lanes.step, lanes.path, pools.req_to_token,
        batch.req_pool_indices, batch.seq_lens, batch.size, config.topk, config.num_steps, page_size, config.max_len,
        pools.req_to_token.shape[1], BLOCK_R=block_r, BLOCK_W=block_w,
    )  # fmt: skip
    return metadata
