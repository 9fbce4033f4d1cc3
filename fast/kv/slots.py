"""KV of a round: copied prefix tails, the tree's slots, and the commit of the accepted path."""

import math
from typing import NamedTuple, Self, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.target import ForwardOutput
from specsim.fast.drafting.lanes import lane_column
from specsim.fast.model.metadata import KVTensors, slot_of
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous

_COMMITTED = 512  # entries of a token's KV that one program moves


class BatchProgress(NamedTuple):
    """Progress of a batch's requests."""

    seq_lens: torch.Tensor  # i64 [B], 0 of a padded request
    num_rounds: torch.Tensor  # i64 [B], rounds that a request has had, 0 of a padded one

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Make the progress of a batch."""
        return cls(batch.seq_lens, batch.num_rounds)


def draft_kv(pools: KVPool) -> KVBuffer:
    """Return the drafter's KV, or raise ValueError where the pools have none."""
    if pools.draft is None:
        raise ValueError("the pools hold no drafter KV; make them with make_pools of an engine that has a drafter")
    return pools.draft


@kernel
@no_type_check
def _tails_kernel(
    kv_ptrs,
    table_ptr,
    rows_ptr,
    lens_ptr,
    num_lanes,
    num_steps,
    page_size,
    columns,
    bonus_columns,
    num_slots,
    num_blocks,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy some tail tokens of one request and layer from lane 0's columns to some other lanes'."""
    await_input(PDL)
    request = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    first_lane = 1 + tl.program_id(2) // num_blocks * LANES
    block = tl.program_id(2) % num_blocks
    row = tl.load(rows_ptr + request)
    length = tl.load(lens_ptr + request) + bonus_columns
    table_ptr += row * columns
    tail = length % page_size
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    offs = layer * num_slots * SIZE + tl.arange(0, BLOCK_S)[None, :]
    mask_s = (tl.arange(0, BLOCK_S) < SIZE)[None, :]
    mask_t = (row >= 0) & (token < tail)
    source = tl.load(table_ptr + length - tail + token, mask=mask_t, other=-1)
    mask = (source >= 0)[:, None] & mask_s
    key = tl.load(kv_ptrs.keys_ptr + source[:, None] * SIZE + offs, mask=mask)
    if kv_ptrs.values_ptr is not None:
        value = tl.load(kv_ptrs.values_ptr + source[:, None] * SIZE + offs, mask=mask)
    for lane in range(first_lane, tl.minimum(first_lane + LANES, num_lanes)):
        column = lane_column(length, lane, token - tail, num_steps, page_size)
        slot = tl.load(table_ptr + column, mask=mask_t & (column < columns), other=-1)
        mask_slot = mask & (slot >= 0)[:, None]
        tl.store(kv_ptrs.keys_ptr + slot[:, None] * SIZE + offs, key, mask=mask_slot)
        if kv_ptrs.values_ptr is not None:
            tl.store(kv_ptrs.values_ptr + slot[:, None] * SIZE + offs, value, mask=mask_slot)


def duplicate_tails(batch: Batch, config: SpecConfig, pools: KVPool, bonus_columns: int = 0) -> None:
    """Copy the prefix tail's draft KV, content and not indices (sglang#7725), to lanes 1..K-1 before drafting.

    The drafter's prefix has L + bonus_columns columns.
    """
    if config.lanes_share_prefix:
        return
    kv = draft_kv(pools)
    num_layers, num_slots, *shape = kv.keys.shape
    size = math.prod(shape)
    block = block_of(config.page_size - 1, 8, size)
    lanes = block_of(config.topk - 1, 1)
    num_blocks = ceil_div(config.page_size - 1, block)
    _tails_kernel[batch.size, num_layers, ceil_div(config.topk - 1, lanes) * num_blocks](
        kv_ptrs=KVTensors.of(kv),
        table_ptr=pools.req_to_token,
        rows_ptr=batch.req_pool_indices,
        lens_ptr=batch.seq_lens,
        num_lanes=config.topk,
        num_steps=config.num_steps,
        page_size=config.page_size,
        columns=pools.req_to_token.shape[1],
        bonus_columns=bonus_columns,
        num_slots=num_slots,
        num_blocks=num_blocks,
        SIZE=size,
        LANES=lanes,
        BLOCK_T=block,
        BLOCK_S=next_power_of_2(size),
    )


@kernel
@no_type_check
def _locations_kernel(
    out_ptr, table_ptr, rows_ptr, lens_ptr, count, num_nodes, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < count
    request = offs // num_nodes
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    column = tl.load(lens_ptr + request, mask=mask, other=0) + offs % num_nodes
    slot = slot_of(table_ptr, columns, row, column, mask=row >= 0)
    tl.store(out_ptr + offs, slot, mask=mask)


def tree_locations(batch: Batch, config: SpecConfig, pools: KVPool, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Find the slots i64 [B, N] of the tree's columns L..L+N-1, -1 in padded rows."""
    num_nodes = config.num_draft_tokens
    columns = pools.req_to_token.shape[1]
    out = batch.seq_lens.new_empty(batch.size, num_nodes) if out is None else out
    block = block_of(out.numel(), 256)
    _locations_kernel[(ceil_div(out.numel(), block),)](
        out_ptr=out,
        table_ptr=pools.req_to_token,
        rows_ptr=batch.req_pool_indices,
        lens_ptr=batch.seq_lens,
        count=out.numel(),
        num_nodes=num_nodes,
        columns=columns,
        BLOCK=block,
    )
    return out


@kernel
@no_type_check
def _commit_kernel(
    kv_ptrs,
    token_ids_ptr,
    next_ptrs,
    progress_ptrs,
    table_ptr,
    rows_ptr,
    locations_ptr,
    accept_index_ptr,
    num_accepted_tokens_ptr,
    predict_ptr,
    width,
    columns,
    token_columns,
    num_slots,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move some entries of each token on the path, of one request and layer, reading all before writing any."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK_W)
    row = tl.load(rows_ptr + request)
    length = tl.load(progress_ptrs.seq_lens + request)
    column = length + step
    real = row >= 0
    node = tl.load(accept_index_ptr + request * width + step, mask=(step < width) & real, other=-1).to(tl.int64)
    source = tl.load(locations_ptr + node, mask=node >= 0, other=-1)
    destination = slot_of(table_ptr, columns, row, column, mask=node >= 0)
    moves = (source >= 0) & (destination >= 0) & (source != destination)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        count = tl.load(num_accepted_tokens_ptr + request)
        tl.store(next_ptrs.seq_lens + request, tl.where(real, length + count, 0))
        tl.store(next_ptrs.num_rounds + request, tl.where(real, tl.load(progress_ptrs.num_rounds + request) + 1, 0))
        token = tl.load(predict_ptr + node, mask=node >= 0, other=0).to(tl.int64)
        noted = (node >= 0) & (step < count) & (column + 1 < token_columns)
        tl.store(token_ids_ptr + row * token_columns + column + 1, token, mask=noted)
    if tl.max(moves.to(tl.int32), axis=0) > 0:
        offs = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
        mask = moves[:, None] & (offs < SIZE)[None, :]
        offs = tl.program_id(1).to(tl.int64) * num_slots * SIZE + offs[None, :]
        key = tl.load(kv_ptrs.keys_ptr + source[:, None] * SIZE + offs, mask=mask)
        if kv_ptrs.values_ptr is not None:
            value = tl.load(kv_ptrs.values_ptr + source[:, None] * SIZE + offs, mask=mask)
        tl.debug_barrier()
        tl.store(kv_ptrs.keys_ptr + destination[:, None] * SIZE + offs, key, mask=mask)
        if kv_ptrs.values_ptr is not None:
            tl.store(kv_ptrs.values_ptr + destination[:, None] * SIZE + offs, value, mask=mask)


def commit(
    batch: Batch,
    cache_locations: torch.Tensor,
    verdict: Verdict,
    pools: KVPool,
    *,
    out: BatchProgress | None = None,
) -> BatchProgress:
    """Move the accepted path's target KV to columns L..L+n and its tokens, bonus last, to L+1..L+n+1.

    Returns the progress after it. Fused: the reference's commit and record_tokens. The whole path is read before any of
    it is written. KV that is already in place, such as all of a chain's, is not written.
    """
    kv = pools.target
    num_layers, num_slots, *shape = kv.keys.shape
    size = math.prod(shape)
    width = verdict.accept_index.shape[1]
    out = BatchProgress(torch.empty_like(batch.seq_lens), torch.empty_like(batch.num_rounds)) if out is None else out
    block = min(block_of(size, _COMMITTED, width), next_power_of_2(size))
    _commit_kernel[batch.size, num_layers, ceil_div(size, block)](
        kv_ptrs=KVTensors.of(kv),
        token_ids_ptr=pools.token_ids,
        next_ptrs=out,
        progress_ptrs=BatchProgress.of(batch),
        table_ptr=pools.req_to_token,
        rows_ptr=batch.req_pool_indices,
        locations_ptr=cache_locations,
        accept_index_ptr=verdict.accept_index,
        num_accepted_tokens_ptr=verdict.num_accepted_tokens,
        predict_ptr=verdict.predict,
        width=width,
        columns=pools.req_to_token.shape[1],
        token_columns=pools.token_ids.shape[1],
        num_slots=num_slots,
        SIZE=size,
        BLOCK_W=next_power_of_2(width),
        BLOCK_X=block,
    )
    return out


@kernel
@no_type_check
def _write_kernel(out_ptr, rows_ptr, slots_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    offs = tl.arange(0, BLOCK)
    values = tl.load(rows_ptr + row * SIZE + offs, mask=offs < SIZE)
    tl.store(out_ptr + slot * SIZE + offs, values, mask=(offs < SIZE) & (slot >= 0))


def write_side(pools: KVPool, slots_R: torch.Tensor, output: ForwardOutput) -> None:
    """Write the side outputs of rows to their slots, without those of slot -1."""
    for name, out in pools.side.rows.items():
        rows = output.side[name]
        require_contiguous(rows=rows)
        size = rows[0].numel() if len(rows) else 1
        _write_kernel[(len(rows),)](
            out_ptr=out, rows_ptr=rows, slots_ptr=slots_R, SIZE=size, BLOCK=next_power_of_2(size), num_warps=1
        )


@kernel
@no_type_check
def _move_kernel(
    out_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    locations_ptr,
    accept_index_ptr,
    width,
    columns,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move the rows of one request's path to its columns from L on, reading all before writing any."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK_W)
    row = tl.load(rows_ptr + request)
    column = tl.load(lens_ptr + request) + step
    node = tl.load(accept_index_ptr + request * width + step, mask=(step < width) & (row >= 0), other=-1).to(tl.int64)
    source = tl.load(locations_ptr + node, mask=node >= 0, other=-1)
    destination = slot_of(table_ptr, columns, row, column, mask=node >= 0)
    moves = ((source >= 0) & (destination >= 0) & (source != destination))[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    values = tl.load(out_ptr + source[:, None] * SIZE + offs, mask=moves & (offs < SIZE))
    tl.debug_barrier()
    tl.store(out_ptr + destination[:, None] * SIZE + offs, values, mask=moves & (offs < SIZE))


def move_side(batch: Batch, cache_locations: torch.Tensor, verdict: Verdict, pools: KVPool) -> None:
    """Move the accepted path's side outputs to columns L..L+n, as `commit` moves its KV."""
    batch_size, width = verdict.accept_index.shape
    for out in pools.side.rows.values():
        size = out[0].numel()
        _move_kernel[(batch_size,)](
            out_ptr=out,
            table_ptr=pools.req_to_token,
            rows_ptr=batch.req_pool_indices,
            lens_ptr=batch.seq_lens,
            locations_ptr=cache_locations,
            accept_index_ptr=verdict.accept_index,
            width=width,
            columns=pools.req_to_token.shape[1],
            SIZE=size,
            BLOCK_W=next_power_of_2(width),
            BLOCK=next_power_of_2(size),
        )
