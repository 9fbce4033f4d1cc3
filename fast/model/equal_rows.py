"""Attention metadata of requests that all have the same number of rows."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import WORD, AttentionMetadata
from specsim.fast.runtime.launch import ceil_div


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
        extras_are_rows=extras_are_rows,
    )
