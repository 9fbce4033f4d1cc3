"""Slots and tokens of columns: what the tables hold, and neither where masked or beyond the last column."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.model.metadata import known_token, slot_of
from specsim.fast.runtime.launch import kernel


@kernel
@no_type_check
def _read(table_ptr, rows_ptr, columns_ptr, mask_ptr, slots_ptr, tokens_ptr, width):
    offs = tl.arange(0, 4)
    row = tl.load(rows_ptr + offs)
    column = tl.load(columns_ptr + offs)
    mask = tl.load(mask_ptr + offs)
    tl.store(slots_ptr + offs, slot_of(table_ptr, width, row, column, mask=mask))
    tl.store(tokens_ptr + offs, known_token(table_ptr, width, row, column, mask=mask))


def test_columns_are_read_within_their_row(pools, device):
    """Column 8 of the first row is the second row's first in memory."""
    rows, columns = torch.tensor([[1, 0, 0, 1], [3, 7, 8, 0]], device=device)
    slots, tokens = torch.empty(2, 4, dtype=torch.int64, device=device)
    _read[(1,)](
        table_ptr=pools.req_to_token,
        rows_ptr=rows,
        columns_ptr=columns,
        mask_ptr=torch.tensor([True, True, True, False], device=device),
        slots_ptr=slots,
        tokens_ptr=tokens,
        width=pools.req_to_token.shape[1],
    )
    assert slots.tolist() == [23, 17, -1, -1]
    assert tokens.tolist() == [23, 17, 0, 0]
