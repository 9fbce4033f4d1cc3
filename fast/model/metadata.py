"""Attention metadata: the rows of one forward and the keys that they see, as tensors for the kernels.

This module has the rows that see every column up to their own; specsim.fast.model.draft_metadata has the others.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel

WORD = tl.constexpr(32)  # visibility bits of one i32


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
