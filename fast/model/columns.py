"""Columns of requests: the slots of their KV, and their known tokens."""

from typing import no_type_check

import triton
import triton.language as tl


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
