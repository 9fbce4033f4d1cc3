"""Metadata of requests with equal rows: entries of rows, and one entry of each request from its first row."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.model.metadata import equal_rows, store_own_extras, store_rows
from specsim.fast.runtime.launch import kernel

ROWS = 3


@kernel
@no_type_check
def _store(metadata_ptrs, slots_ptr, total, num_rows, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < total
    store_rows(
        metadata_ptrs,
        offs,
        num_rows,
        position=offs + 100,
        prefix_len=offs + 200,
        key_len=offs + 300,
        num_extras=offs + 400,
        mask=mask,
    )
    store_own_extras(metadata_ptrs, offs, tl.load(slots_ptr + offs, mask=mask), offs + 100, mask)


def test_every_entry_is_written_by_programs_of_any_size(pools, make_batch, device):
    """Blocks of four rows end inside requests of three."""
    batch = make_batch([1, 0], [5, 1])
    slots = torch.tensor([7, 5, -1, 9, 8, 4], device=device)
    metadata = equal_rows(batch, slots, ROWS, ROWS, pools)
    _store[(2,)](metadata_ptrs=metadata.tensors, slots_ptr=slots, total=len(slots), num_rows=ROWS, BLOCK=4)
    assert metadata.positions.tolist() == [*range(100, 106)]
    assert metadata.prefix_lens.tolist() == [*range(200, 206)]
    assert metadata.key_lens.tolist() == [300, 303]
    assert metadata.num_extras.tolist() == [400, 403]
    assert metadata.row_starts.tolist() == [0, 3, 6]
    assert metadata.extra_slots.tolist() == [[7, 5, -1], [9, 8, 4]]
    assert metadata.extra_positions.tolist() == [[100, 101, 102], [103, 104, 105]]
    assert metadata.visible.shape == (6, 1)
    assert (metadata.max_rows, metadata.has_equal_rows, metadata.is_causal) == (ROWS, True, False)
    assert metadata.slots is slots
    assert metadata.table_rows is batch.req_pool_indices
