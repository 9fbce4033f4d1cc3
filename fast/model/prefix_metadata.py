"""Attention metadata of rows that see a request's committed columns only, and write nothing."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import AttentionMetadata, equal_rows, store_rows
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel
from specsim.fast.vocabulary.draft_distribution import Root


@kernel
@no_type_check
def _prefix_kernel(
    metadata_ptrs,
    slots_ptr,
    rows_ptr,
    root,
    num_requests,
    num_rows,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the metadata of some rows, each request with num_rows of them at one position."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
    mask = offs < num_requests * num_rows
    request = offs // num_rows
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    length = tl.load(root.lens_ptr + request, mask=mask, other=0)
    if root.counts_ptr is not None:
        length += tl.load(root.counts_ptr + request, mask=mask, other=0)
    length = tl.where(real, length, 0)
    position = tl.maximum(length - 1, 0) if IS_LAST else length
    tl.store(slots_ptr + offs, tl.full([BLOCK], -1, tl.int64), mask=mask)
    store_rows(
        metadata_ptrs,
        offs,
        num_rows,
        position=position,
        prefix_len=length,
        key_len=length,
        num_extras=tl.zeros([BLOCK], tl.int32),
        mask=mask,
    )


def prefix_metadata(batch: Batch, root: Root, num_rows: int, position: str, pools: KVPool) -> AttentionMetadata:
    """Make the metadata of `num_rows` rows a request that see columns 0..L-1 of their round.

    position: of all these rows, `last` (L - 1) or `next` (L).
    """
    total = batch.size * num_rows
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    metadata = equal_rows(batch, slots, num_rows, 0, pools)
    block = block_of(total, 128)
    _prefix_kernel[(ceil_div(total, block),)](
        metadata_ptrs=metadata.tensors,
        slots_ptr=slots,
        rows_ptr=batch.req_pool_indices,
        root=root,
        num_requests=batch.size,
        num_rows=num_rows,
        IS_LAST=position == "last",
        BLOCK=block,
    )
    return metadata
