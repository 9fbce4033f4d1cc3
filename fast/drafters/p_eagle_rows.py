"""Rows of a P-EAGLE head: new positions, mask rows after them, and the last rows by depth."""

from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.eagle import Mask
from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import known_token, slot_of
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2

_FEATURES = 1024
_ROWS = 16


class NewPositions(NamedTuple):
    """Target features of each request's new positions, as kernel arguments."""

    features: torch.Tensor  # [rows, F]
    row_starts: torch.Tensor  # i64 [B+1], or longer
    start_lens: torch.Tensor  # i64 [B], column of the first one
    counts: torch.Tensor  # [B]


class HeadRows(NamedTuple):
    """Rows of the head: a request's new ones, S-1 mask rows, and dropped ones up to the next request's."""

    features: torch.Tensor  # [R, F]
    ids: torch.Tensor  # i64 [R]
    slots: torch.Tensor  # i64 [R], -1 for a dropped row


class LastRows(NamedTuple):
    """The rows that drafts come from, depth after depth."""

    hidden: torch.Tensor  # [S, B, H]
    slots: torch.Tensor  # i64 [S, B]
    root_lens: torch.Tensor  # i64 [B], L after the new positions


@kernel
@no_type_check
def _rows_kernel(
    new_ptrs,
    row_starts_ptr,
    mask_features_ptr,
    token_ids_ptr,
    table_ptr,
    table_rows_ptr,
    out_ptrs,
    mask_token,
    num_masks,
    columns,
    token_columns,
    max_len,
    FEATURES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather features, ids and slots of one request's rows; rows past its last mask row are zeros without a slot."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows_ptr + request)
    start = tl.load(new_ptrs.start_lens + request)
    count = tl.load(new_ptrs.counts + request).to(tl.int64)
    low = tl.load(row_starts_ptr + request)
    step = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]  # [BLOCK_R, 1]
    mask = low + step < tl.load(row_starts_ptr + request + 1)
    live = mask & (row >= 0) & (step < count + num_masks)
    is_new = live & (step < count)
    offs = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask_f = offs < FEATURES
    source = tl.load(new_ptrs.row_starts + request) + step
    features = tl.load(new_ptrs.features + source * FEATURES + offs, mask=is_new & mask_f, other=0.0)
    learned = tl.load(mask_features_ptr + offs, mask=mask_f, other=0.0)
    features = tl.where(live & (step >= count), learned, features)
    tl.store(out_ptrs.features + (low + step) * FEATURES + offs, features, mask=mask & mask_f)
    if tl.program_id(2) == 0:
        column = start + step
        token = known_token(token_ids_ptr, token_columns, row, column + 1, mask=is_new)
        tl.store(out_ptrs.ids + low + step, tl.where(live & (step >= count), mask_token, token), mask=mask)
        slot = slot_of(table_ptr, columns, row, column, mask=live & (column < max_len))
        tl.store(out_ptrs.slots + low + step, slot, mask=mask)


@kernel
@no_type_check
def _last_kernel(
    new_ptrs,
    row_starts_ptr,
    table_rows_ptr,
    hidden_ptr,
    slots_ptr,
    last_ptrs,
    out_ptr,
    batch_size,
    num_steps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the hidden state of one depth's row of a request, to the draft input too, and its slot."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.program_id(1).to(tl.int64)
    real = tl.load(table_rows_ptr + request) >= 0
    count = tl.load(new_ptrs.counts + request).to(tl.int64)
    source = tl.load(row_starts_ptr + request) + tl.maximum(count, 1) - 1 + depth
    offs = tl.arange(0, BLOCK)
    values = tl.load(hidden_ptr + source * SIZE + offs, mask=offs < SIZE)
    last = depth * batch_size + request
    tl.store(last_ptrs.hidden + last * SIZE + offs, values, mask=offs < SIZE)
    tl.store(out_ptr + (request * num_steps + depth) * SIZE + offs, values, mask=offs < SIZE)
    tl.store(last_ptrs.slots + last, tl.load(slots_ptr + source))
    if depth == 0:
        start = tl.load(new_ptrs.start_lens + request)
        tl.store(last_ptrs.root_lens + request, tl.where(real, start + count, 0))


def head_rows(
    batch: Batch,
    new: NewPositions,
    row_starts: torch.Tensor,
    num_rows: int,
    most_rows: int,
    mask: Mask,
    limits: tuple[int, int],
    pools: KVPool,
) -> HeadRows:
    """Gather the rows of the head.

    limits: mask rows of each request, and max_len. most_rows: of one request. row_starts: i64 [B+1], of all R rows.
    """
    num_masks, max_len = limits
    num_features = len(mask.features)
    rows = HeadRows(
        features=new.features.new_empty(num_rows, num_features),
        ids=batch.seq_lens.new_empty(num_rows),
        slots=batch.seq_lens.new_empty(num_rows),
    )
    block_f = block_of(num_features, _FEATURES)
    block_r = block_of(most_rows, _ROWS, block_f)
    _rows_kernel[batch.size, ceil_div(most_rows, block_r), ceil_div(num_features, block_f)](
        new_ptrs=new,
        row_starts_ptr=row_starts,
        mask_features_ptr=mask.features,
        token_ids_ptr=pools.token_ids,
        table_ptr=pools.req_to_token,
        table_rows_ptr=batch.req_pool_indices,
        out_ptrs=rows,
        mask_token=mask.token_id,
        num_masks=num_masks,
        columns=pools.req_to_token.shape[1],
        token_columns=pools.token_ids.shape[1],
        max_len=max_len,
        FEATURES=num_features,
        BLOCK_R=block_r,
        BLOCK_F=block_f,
    )
    return rows


def last_rows(
    batch: Batch,
    new: NewPositions,
    row_starts: torch.Tensor,
    hidden_RH: torch.Tensor,
    slots_R: torch.Tensor,
    out: torch.Tensor,
) -> LastRows:
    """Take the rows of every depth: a request's last new one and its mask rows.

    out: [B, S, H], their hidden states.
    """
    batch_size, num_steps, hidden_size = out.shape
    last = LastRows(
        hidden=hidden_RH.new_empty(num_steps, batch_size, hidden_size),
        slots=slots_R.new_empty(num_steps, batch_size),
        root_lens=slots_R.new_empty(batch_size),
    )
    _last_kernel[batch_size, num_steps](
        new_ptrs=new,
        row_starts_ptr=row_starts,
        table_rows_ptr=batch.req_pool_indices,
        hidden_ptr=hidden_RH,
        slots_ptr=slots_R,
        last_ptrs=last,
        out_ptr=out,
        batch_size=batch_size,
        num_steps=num_steps,
        SIZE=hidden_size,
        BLOCK=next_power_of_2(hidden_size),
    )
    return last
