"""Attention metadata of blocks, whose rows see a request's committed columns and their whole block."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import WORD, AttentionMetadata, equal_rows, slot_of, store_own_extras, store_rows
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel


@kernel
@no_type_check
def _block_kernel(
    metadata_ptrs,
    slots_ptr,
    ids_ptr,
    bonus_tokens_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    num_requests,
    num_rows,
    mask_token,
    max_len,
    columns,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the ids and the metadata of some rows, each request with num_rows of them from column L on."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
    mask = offs < num_requests * num_rows
    request = offs // num_rows
    step = offs % num_rows
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    real = row >= 0
    length = tl.load(lens_ptr + request, mask=mask & real, other=0)
    limit = tl.minimum(max_len, columns)
    live = mask & real & (length + step < limit)
    slot = slot_of(table_ptr, columns, row, length + step, mask=live)
    position = tl.where(live, length + step, 0)
    bonus = tl.load(bonus_tokens_ptr + request, mask=mask, other=0).to(tl.int64)
    tl.store(ids_ptr + offs, tl.where(step == 0, bonus, mask_token), mask=mask)
    tl.store(slots_ptr + offs, slot, mask=mask)
    store_rows(
        metadata_ptrs,
        offs,
        num_rows,
        position=position,
        prefix_len=tl.where(live, length, 0),
        key_len=length,
        num_extras=tl.where(real, num_rows, 0),
        mask=mask,
    )
    store_own_extras(metadata_ptrs, offs, slot, position, mask)
    num_words = (num_rows + WORD - 1) // WORD
    num_live = tl.where(live, tl.minimum(num_rows, limit - length), 0)
    for word in range(num_words):
        count = tl.minimum(tl.maximum(num_live - word * WORD, 0), WORD).to(tl.int64)
        bits = ((tl.full([BLOCK], 1, tl.int64) << count) - 1).to(tl.int32)
        tl.store(metadata_ptrs.visible + offs * num_words + word, bits, mask=mask)


def block_metadata(
    batch: Batch, bonus_tokens: torch.Tensor, num_rows: int, mask_token: int, max_len: int, pools: KVPool
) -> tuple[torch.Tensor, AttentionMetadata]:
    """Make the ids i64 [R] and the metadata of blocks [bonus, mask, mask, ...], whose row j is column L + j.

    A row at or beyond max_len is dropped, and seen by none.
    """
    total = batch.size * num_rows
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    ids_R = torch.empty_like(slots)
    metadata = equal_rows(batch, slots, num_rows, num_rows, pools)
    block = block_of(total, 128)
    _block_kernel[(ceil_div(total, block),)](
        metadata_ptrs=metadata.tensors,
        slots_ptr=slots,
        ids_ptr=ids_R,
        bonus_tokens_ptr=bonus_tokens,
        table_ptr=pools.req_to_token,
        rows_ptr=batch.req_pool_indices,
        lens_ptr=batch.seq_lens,
        num_requests=batch.size,
        num_rows=num_rows,
        mask_token=mask_token,
        max_len=max_len,
        columns=pools.req_to_token.shape[1],
        BLOCK=block,
        WORD=WORD.value,
    )
    return ids_R, metadata
