"""Attention metadata: the rows of one forward and the keys that they see, as tensors for the kernels."""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, VerifyInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel

WORD = tl.constexpr(32)  # visibility bits of one i32


@triton.jit
@no_type_check
def slot_of(table_ptr, columns, row, column, mask):
    """Load the slots of columns in rows of req_to_token.

    They are -1 where mask is false or the column is beyond the table.
    """
    return tl.load(table_ptr + row * columns + column, mask=mask & (column < columns), other=-1)


@triton.jit
@no_type_check
def known_token(token_ids_ptr, columns, row, column, mask):
    """Load the tokens of columns in rows of the pool's token ids.

    They are 0 where mask is false or the column is beyond the table.
    """
    return tl.load(token_ids_ptr + row * columns + column, mask=mask & (column < columns), other=0)


class KVTensors(NamedTuple):
    """KV as kernel arguments, without the name `values`, an attribute of Triton's own tuple."""

    keys_ptr: torch.Tensor
    values_ptr: torch.Tensor | None  # None where values are in the keys
    key_scale: float  # of fp8
    value_scale: float

    @classmethod
    def of(cls, kv: KVBuffer, layer: int | None = None) -> Self:
        """Make the arguments for a layer, or for all."""
        keys = kv.keys if layer is None else kv.keys[layer]
        values = kv.values if layer is None else kv.values[layer]
        return cls(keys, None if kv.values_in_keys else values, kv.key_scale, kv.value_scale)


class MetadataTensors(NamedTuple):
    """The tensors of AttentionMetadata that kernels write and attention reads."""

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
    """Rows, keys and visibility of one forward, request after request, rebuilt for every forward (vllm#41162).

    A request's keys are its prefix and its extra keys. A row sees the first prefix_lens prefix keys, and the extra keys
    whose bits are set. Prefix key c has position c and the slot in the table's column c, which must be owned if a row
    sees it. No row sees an extra key without a slot.
    """

    positions: torch.Tensor  # i64 [R], 0 for a dropped row
    slots: torch.Tensor  # i64 [R], where a row writes its KV; -1 for a dropped row, which sees nothing
    row_starts: torch.Tensor  # i64 [B+1]
    max_rows: int  # most rows of a request
    has_equal_rows: bool  # every request has max_rows rows, in every batch of the phase
    table: torch.Tensor  # i64 [rows, columns], the pool's
    table_rows: torch.Tensor  # i64 [B], row of the table; -1 for a padded request
    prefix_lens: torch.Tensor  # i32 [R], prefix keys that a row sees
    # i32 [B], bound on the prefix keys that a row of the request sees; unless is_causal, every row that is not dropped
    # sees exactly that many
    key_lens: torch.Tensor
    is_causal: bool
    num_extras: torch.Tensor  # i32 [B], extra keys of a request
    extra_slots: torch.Tensor  # i32 [B, E], -1 for none
    extra_positions: torch.Tensor  # i32 [B, E]
    visible: torch.Tensor  # i32 [R, E/32 rounded up], bit e % 32 of word e / 32: the row sees extra key e
    extras_are_rows: bool = False  # a request's rows are its extra keys, and see their own unless they are dropped

    @property
    def tensors(self) -> MetadataTensors:
        """The tensors as kernel arguments."""
        return MetadataTensors(*(getattr(self, name) for name in MetadataTensors._fields))


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
    """Write the metadata of rows that see every column up to their own."""
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


def causal_metadata(
    rows_B: torch.Tensor,
    start_lens_B: torch.Tensor,
    row_starts: torch.Tensor,
    max_rows: int,
    has_equal_rows: bool,
    slots_R: torch.Tensor,
    pools: KVPool,
) -> AttentionMetadata:
    """Make causal metadata, in which a row sees every column up to its own.

    Row j of request b has position start_lens[b] + j.
    """
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
    """Make the causal metadata of prefill, for target and drafter, outside graphs.

    Every column of the chunk must be owned.
    """
    rows = batch.req_pool_indices[prefill.requests]
    if rows.is_cuda:  # the host would wait for the check
        slots = pools.req_to_token[rows, prefill.columns]
    else:
        slots = pools.slots(rows, prefill.columns)
    max_rows = prefill.max_rows
    if max_rows is None:
        max_rows = max(prefill.row_starts.diff().tolist(), default=0)
    return causal_metadata(
        batch.req_pool_indices, prefill.start_lens, prefill.row_starts, max_rows, False, slots, pools
    )


def extend_metadata(
    batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, bonus_columns: int = 0
) -> AttentionMetadata:
    """Make the causal metadata of draft-extend, with the same number of rows for each request.

    Row j of a request is column L + bonus_columns + j. Rows without a slot come last.
    """
    extend = draft_extend_input
    start_lens = extend.seq_lens + bonus_columns if bonus_columns else extend.seq_lens
    max_rows = len(extend.input_ids) // max(batch.size, 1)
    return causal_metadata(
        extend.req_pool_indices, start_lens, extend.row_starts, max_rows, True, extend.cache_locations, pools
    )


@triton.jit
@no_type_check
def store_rows(metadata_ptrs, offs, num_rows, position, prefix_len, key_len, num_extras, mask):
    """Store the entries of rows, and those of each request at its first row; num_rows: of every request."""
    request = offs // num_rows
    first = mask & (offs % num_rows == 0)
    end = offs + 1
    tl.store(metadata_ptrs.positions + offs, position, mask=mask)
    tl.store(metadata_ptrs.prefix_lens + offs, prefix_len.to(tl.int32), mask=mask)
    tl.store(metadata_ptrs.key_lens + request, key_len.to(tl.int32), mask=first)
    tl.store(metadata_ptrs.num_extras + request, num_extras.to(tl.int32), mask=first)
    tl.store(metadata_ptrs.row_starts + request, offs, mask=first)
    tl.store(metadata_ptrs.row_starts + end // num_rows, end, mask=mask & (end % num_rows == 0))


@triton.jit
@no_type_check
def store_own_extras(metadata_ptrs, offs, slot, position, mask):
    """Store the rows of a request as its extra keys."""
    tl.store(metadata_ptrs.extra_slots + offs, slot.to(tl.int32), mask=mask)
    tl.store(metadata_ptrs.extra_positions + offs, position.to(tl.int32), mask=mask)


def equal_rows(
    batch: Batch, slots: torch.Tensor, rows: int, extras: int, pools: KVPool, extras_are_rows: bool = False
) -> AttentionMetadata:
    """Allocate metadata of requests that all have the same number of rows."""
    num_requests = batch.size
    total = num_requests * rows
    device = batch.seq_lens.device

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return AttentionMetadata(
        positions=new(total, dtype=torch.int64),
        slots=slots,
        row_starts=new(num_requests + 1, dtype=torch.int64),
        max_rows=rows,
        has_equal_rows=True,
        table=pools.req_to_token,
        table_rows=batch.req_pool_indices,
        prefix_lens=new(total),
        key_lens=new(num_requests),
        is_causal=False,
        num_extras=new(num_requests),
        extra_slots=new(num_requests, extras),
        extra_positions=new(num_requests, extras),
        visible=new(total, ceil_div(extras, WORD.value)),
        extras_are_rows=extras_are_rows,
    )


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
    num_requests, num_nodes = verify_input.draft_tokens.shape
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
        num_requests=num_requests,
        num_nodes=num_nodes,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
    )
    return metadata
