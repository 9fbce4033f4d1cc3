"""Attention metadata of drafts: tree nodes at verify, and lanes of a draft step."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, VerifyInput
from specsim.core.pool import KVPool
from specsim.fast.drafting.lanes import Lanes
from specsim.fast.model.columns import slot_of
from specsim.fast.model.equal_rows import equal_rows, store_own_extras, store_rows
from specsim.fast.model.metadata import WORD, AttentionMetadata
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel


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
    """Write the metadata of tree nodes: a program takes some rows and some words of their visibility."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)  # [BLOCK_R]
    mask = offs < num_requests * num_nodes
    request = offs // num_nodes
    slot = tl.load(slots_ptr + offs, mask=mask, other=-1)
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    live = real & (slot >= 0)
    if tl.program_id(1) == 0:
        position = tl.load(node_positions_ptr + offs, mask=live, other=0)
        length = tl.load(lens_ptr + request, mask=real & mask, other=0)
        store_rows(
            metadata_ptrs,
            offs,
            num_nodes,
            position=position,
            prefix_len=tl.where(live, length, 0),
            key_len=length,
            num_extras=tl.where(real, num_nodes, 0),
            mask=mask,
        )
        store_own_extras(metadata_ptrs, offs, slot, position, mask)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    bit = tl.arange(0, WORD)[None, None, :]
    other = word[None, :, None] * WORD + bit  # [1, BLOCK_W, WORD]
    mask_seen = live[:, None, None] & (other < num_nodes)  # [BLOCK_R, BLOCK_W, WORD]
    seen = tl.load(mask_ptr + offs[:, None, None] * num_nodes + other, mask=mask_seen, other=0)
    num_words = (num_nodes + WORD - 1) // WORD
    packed = tl.sum((seen != 0).to(tl.int32) << bit, axis=2)  # [BLOCK_R, BLOCK_W]
    mask_w = mask[:, None] & (word < num_words)[None, :]
    tl.store(metadata_ptrs.visible + offs[:, None] * num_words + word[None, :], packed, mask=mask_w)


def tree_metadata(batch: Batch, verify_input: VerifyInput, pools: KVPool) -> AttentionMetadata:
    """Make the metadata of verify, in which a node sees the prefix and the nodes in its mask row."""
    num_nodes = verify_input.draft_tokens.shape[1]
    slots = verify_input.cache_locations
    metadata = equal_rows(batch, slots, num_nodes, num_nodes, pools, extras_are_rows=True)
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
    total = batch.size * config.topk
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
        num_requests=batch.size,
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
