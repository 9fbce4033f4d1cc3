"""Where a round's KV lives: copied prefix tails, the tree, and the commit of the accepted path."""

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import lane_column
from specsim.fast.runtime.launch import await_input, block_of, kernel

_COMMITTED = 512  # numbers of a token's KV that one program moves


@kernel
def _tails_kernel(
    keys_ptr, values_ptr, table_ptr, rows_ptr, lens_ptr, num_lanes, num_steps, page_size, columns, num_slots,
    num_blocks, SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One request and layer: some tokens of the tail, from lane 0's columns to those of some other lanes."""
    await_input(PDL)
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_lane, block = 1 + tl.program_id(2) // num_blocks * LANES, tl.program_id(2) % num_blocks
    row, length = tl.load(rows_ptr + request), tl.load(lens_ptr + request)
    table_ptr += row * columns
    tail, token = length % page_size, block * BLOCK_T + tl.arange(0, BLOCK_T)
    offs = layer * num_slots * SIZE + tl.arange(0, BLOCK_S)[None, :]
    mask_s = (tl.arange(0, BLOCK_S) < SIZE)[None, :]
    mask_t = (row >= 0) & (token < tail)
    source = tl.load(table_ptr + length - tail + token, mask=mask_t, other=-1)
    mask = (source >= 0)[:, None] & mask_s
    key = tl.load(keys_ptr + source[:, None] * SIZE + offs, mask=mask)
    value = tl.load(values_ptr + source[:, None] * SIZE + offs, mask=mask)
    for lane in range(first_lane, tl.minimum(first_lane + LANES, num_lanes)):
        column = lane_column(length, lane, token - tail, num_steps, page_size)
        slot = tl.load(table_ptr + column, mask=mask_t & (column < columns), other=-1)
        kept = mask & (slot >= 0)[:, None]
        tl.store(keys_ptr + slot[:, None] * SIZE + offs, key, mask=kept)
        tl.store(values_ptr + slot[:, None] * SIZE + offs, value, mask=kept)


def duplicate_tails(batch: Batch, config: SpecConfig, pools: KVPool) -> None:
    """Copy the prefix tail's draft KV, content and not indices (sglang#7725), to lanes 1..K-1; once a round, before
    drafting.
    """
    if config.lanes_share_prefix:
        return
    keys, values = pools.draft.keys, pools.draft.values
    size = keys[0, 0].numel()
    block, lanes = block_of(config.page_size - 1, 8, size), block_of(config.topk - 1, 1)
    num_blocks = triton.cdiv(config.page_size - 1, block)
    _tails_kernel[batch.size, len(keys), triton.cdiv(config.topk - 1, lanes) * num_blocks](
        keys, values, pools.req_to_token, batch.req_pool_indices, batch.seq_lens, config.topk, config.num_steps,
        config.page_size, pools.req_to_token.shape[1], keys.shape[1], num_blocks,
        SIZE=size, LANES=lanes, BLOCK_T=block, BLOCK_S=triton.next_power_of_2(size),
    )  # fmt: skip


@kernel
def _locations_kernel(
    out_ptr, table_ptr, rows_ptr, lens_ptr, count, num_nodes, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask, request = offs < count, offs // num_nodes
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    column = tl.load(lens_ptr + request, mask=mask, other=0) + offs % num_nodes
    slot = tl.load(table_ptr + row * columns + column, mask=(row >= 0) & (column < columns), other=-1)
    tl.store(out_ptr + offs, slot, mask=mask)


def tree_locations(batch: Batch, config: SpecConfig, pools: KVPool, out: torch.Tensor | None = None) -> torch.Tensor:
    """Slots i64 [B, N] of columns L..L+N-1, where the tree stands; -1 in padded rows."""
    num_nodes, columns = config.num_draft_tokens, pools.req_to_token.shape[1]
    out = batch.seq_lens.new_empty(batch.size, num_nodes) if out is None else out
    block = block_of(out.numel(), 256)
    _locations_kernel[(triton.cdiv(out.numel(), block),)](
        out, pools.req_to_token, batch.req_pool_indices, batch.seq_lens, out.numel(), num_nodes, columns, BLOCK=block
    )
    return out


@kernel
def _commit_kernel(
    keys_ptr, values_ptr, token_ids_ptr, next_lens_ptr, next_rounds_ptr, table_ptr, rows_ptr, lens_ptr, rounds_ptr,
    locations_ptr, accept_index_ptr, num_accepted_tokens_ptr, predict_ptr, width, columns, token_columns, num_slots,
    SIZE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One request and layer, the whole path: some of a token's numbers, read before any of them is written."""
    await_input(PDL)
    request, step = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_W)
    row, length = tl.load(rows_ptr + request), tl.load(lens_ptr + request)
    column, real = length + step, row >= 0
    node = tl.load(accept_index_ptr + request * width + step, mask=(step < width) & real, other=-1).to(tl.int64)
    source = tl.load(locations_ptr + node, mask=node >= 0, other=-1)
    destination = tl.load(table_ptr + row * columns + column, mask=(node >= 0) & (column < columns), other=-1)
    moved = (source >= 0) & (destination >= 0) & (source != destination)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        count = tl.load(num_accepted_tokens_ptr + request)
        tl.store(next_lens_ptr + request, tl.where(real, length + count, 0))
        tl.store(next_rounds_ptr + request, tl.where(real, tl.load(rounds_ptr + request) + 1, 0))
        token = tl.load(predict_ptr + node, mask=node >= 0, other=0).to(tl.int64)
        noted = (node >= 0) & (step < count) & (column + 1 < token_columns)
        tl.store(token_ids_ptr + row * token_columns + column + 1, token, mask=noted)
    if tl.max(moved.to(tl.int32), axis=0) > 0:
        offs = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
        mask = moved[:, None] & (offs < SIZE)[None, :]
        offs = tl.program_id(1).to(tl.int64) * num_slots * SIZE + offs[None, :]
        key = tl.load(keys_ptr + source[:, None] * SIZE + offs, mask=mask)
        value = tl.load(values_ptr + source[:, None] * SIZE + offs, mask=mask)
        tl.debug_barrier()
        tl.store(keys_ptr + destination[:, None] * SIZE + offs, key, mask=mask)
        tl.store(values_ptr + destination[:, None] * SIZE + offs, value, mask=mask)


def commit(
    batch: Batch,
    cache_locations: torch.Tensor,
    verdict: Verdict,
    pools: KVPool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the target KV of the accepted path to columns L..L+n, note the accepted tokens, bonus last, at columns
    L+1..L+n+1, and give what Batch.after does, lengths and numbers of rounds, i64 [B], 0 of padded requests: the
    reference's commit and record_tokens in one launch.

    The whole path is read before any of it is written. What is in its place already, as the whole of a chain is, is
    left alone.
    """
    keys, values, path = pools.target.keys, pools.target.values, verdict.accept_index
    out = (torch.empty_like(batch.seq_lens), torch.empty_like(batch.num_rounds)) if out is None else out
    size, width = keys[0, 0].numel(), path.shape[1]
    block = min(block_of(size, _COMMITTED, width), triton.next_power_of_2(size))
    _commit_kernel[batch.size, len(keys), triton.cdiv(size, block)](
        keys, values, pools.token_ids, *out, pools.req_to_token, batch.req_pool_indices, batch.seq_lens,
        batch.num_rounds, cache_locations, path, verdict.num_accepted_tokens, verdict.predict, width,
        pools.req_to_token.shape[1], pools.token_ids.shape[1], keys.shape[1],
        SIZE=size, BLOCK_W=triton.next_power_of_2(width), BLOCK_X=block,
    )  # fmt: skip
    return out
