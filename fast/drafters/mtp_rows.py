"""Rows of MTP modules: each request's new positions, and before them those that are written again."""

from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.fast.model.metadata import slot_of
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2

_FEATURES = 1024
_ROWS = 16


class Spans(NamedTuple):
    """Columns of each request's rows, as kernel arguments."""

    first_lens: torch.Tensor  # i64 [B], column of its first row
    start_lens: torch.Tensor  # i64 [B], column of its first new row
    end_lens: torch.Tensor  # i64 [B], L after the new rows: tokens 0..L are known; 0 of a padded request
    row_starts: torch.Tensor  # i64 [B+1]


class NewFeatures(NamedTuple):
    """Features of the new rows, as kernel arguments."""

    features: torch.Tensor  # [rows, F]
    row_starts: torch.Tensor  # i64 [B+1], or longer


class SpanShape(NamedTuple):
    """Sizes of one call of all modules."""

    num_rows: int  # R
    most_rows: int  # of one request
    lookahead: int  # most rows of a request that are written again
    has_equal_rows: bool  # in every batch of the phase


class RingTables(NamedTuple):
    """A FeatureRing as kernel arguments."""

    features: torch.Tensor  # [requests, W, F]
    positions: torch.Tensor  # i64 [requests, W]


@kernel
@no_type_check
def _spans_kernel(
    spans_ptrs,
    table_rows_ptr,
    counts_ptr,
    ring_positions_ptr,
    batch_size,
    lookahead,
    most_rows,
    width,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find every request's first row and its end; most_rows: rows of each request, 0 where they differ."""
    await_input(PDL)
    request = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    mask = request < batch_size
    row = tl.load(table_rows_ptr + request, mask=mask, other=-1)
    real = row >= 0
    start = tl.load(spans_ptrs.start_lens + request, mask=real, other=0)
    end = start + tl.load(counts_ptr + request, mask=real, other=0)
    first = start
    if ring_positions_ptr is not None:
        entry = tl.arange(0, BLOCK_W)[None, :]
        mask_w = real[:, None] & (entry < width)
        position = tl.load(ring_positions_ptr + row[:, None] * width + entry, mask=mask_w, other=-1)
        is_rewritten = (position >= 0) & (position >= start[:, None] - lookahead) & (position < start[:, None])
        first -= tl.sum(is_rewritten.to(tl.int64), axis=1)
    tl.store(spans_ptrs.first_lens + request, first, mask=mask)
    tl.store(spans_ptrs.end_lens + request, end, mask=mask)
    if most_rows > 0:
        tl.store(spans_ptrs.row_starts + request, request * most_rows, mask=request <= batch_size)


@kernel
@no_type_check
def _gather_kernel(
    spans_ptrs,
    new_ptrs,
    ring_ptrs,
    table_ptr,
    table_rows_ptr,
    slots_ptr,
    out_ptr,
    columns,
    max_len,
    width,
    FEATURES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather features and slots of one request's rows; rows past its last one are zeros that write nothing."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows_ptr + request)
    start = tl.load(spans_ptrs.start_lens + request)
    low = tl.load(spans_ptrs.row_starts + request)
    rows = low + tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]  # [BLOCK_R, 1]
    mask = rows < tl.load(spans_ptrs.row_starts + request + 1)
    column = tl.load(spans_ptrs.first_lens + request) + rows - low
    live = mask & (row >= 0) & (column < tl.load(spans_ptrs.end_lens + request))
    offs = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask_f = offs < FEATURES
    source = tl.load(new_ptrs.row_starts + request) + column - start
    is_new = live & (column >= start)
    features = tl.load(new_ptrs.features + source * FEATURES + offs, mask=is_new & mask_f, other=0.0)
    if ring_ptrs is not None:
        entry = row * width + column % width
        is_earlier = live & (column < start)
        earlier = tl.load(ring_ptrs.features + entry * FEATURES + offs, mask=is_earlier & mask_f, other=0.0)
        features = tl.where(is_new, features, earlier)
    tl.store(out_ptr + rows * FEATURES + offs, features, mask=mask & mask_f)
    if tl.program_id(2) == 0:
        slot = slot_of(table_ptr, columns, row, column, mask=live & (column < max_len))
        tl.store(slots_ptr + rows, slot, mask=mask)


@kernel
@no_type_check
def _keep_kernel(
    spans_ptrs,
    ring_ptrs,
    table_rows_ptr,
    features_ptr,
    width,
    FEATURES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keep the features of one request's new rows, of the last `width` positions."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows_ptr + request)
    first = tl.load(spans_ptrs.first_lens + request)
    start = tl.load(spans_ptrs.start_lens + request)
    end = tl.load(spans_ptrs.end_lens + request)
    column = tl.maximum(end - width, start) + tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    live = (row >= 0) & (column < end)
    rows = tl.load(spans_ptrs.row_starts + request) + column - first
    entry = row * width + column % width
    offs = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    mask = live & (offs < FEATURES)
    tl.store(
        ring_ptrs.features + entry * FEATURES + offs,
        tl.load(features_ptr + rows * FEATURES + offs, mask=mask, other=0.0),
        mask=mask,
    )
    if tl.program_id(2) == 0:
        tl.store(ring_ptrs.positions + entry, column, mask=live)


def spans_of(
    batch: Batch, start_lens: torch.Tensor, counts: torch.Tensor, lookahead: int, most_rows: int, pools: KVPool
) -> Spans:
    """Find the columns of each request's rows: `counts` new ones, and up to `lookahead` kept ones before them.

    most_rows: rows of every request, those past its last one dropped; 0: exactly its own.
    """
    size = batch.size
    spans = Spans(
        torch.empty_like(start_lens), start_lens, torch.empty_like(start_lens), start_lens.new_empty(size + 1)
    )
    ring = pools.recent if lookahead else None
    width = 1 if ring is None else ring.positions.shape[1]
    block = block_of(size + 1, 32, width)
    _spans_kernel[(ceil_div(size + 1, block),)](
        spans_ptrs=spans,
        table_rows_ptr=batch.req_pool_indices,
        counts_ptr=counts,
        ring_positions_ptr=None if ring is None else ring.positions,
        batch_size=size,
        lookahead=lookahead,
        most_rows=most_rows,
        width=width,
        BLOCK_B=block,
        BLOCK_W=next_power_of_2(width),
    )
    return spans


def gather_rows(
    batch: Batch, spans: Spans, new: NewFeatures, shape: SpanShape, max_len: int, pools: KVPool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather every row's target features and slot, (features [R, F], slots i64 [R]), and keep the new features."""
    ring = pools.recent if shape.lookahead else None
    width = 1 if ring is None else ring.positions.shape[1]
    num_features = new.features.shape[1]
    features_RF = new.features.new_empty(shape.num_rows, num_features)
    slots_R = batch.seq_lens.new_empty(shape.num_rows)
    block_f = block_of(num_features, _FEATURES)
    block_r = block_of(shape.most_rows, _ROWS, block_f)
    ring_ptrs = None if ring is None else RingTables(ring.features, ring.positions)
    _gather_kernel[batch.size, ceil_div(shape.most_rows, block_r), ceil_div(num_features, block_f)](
        spans_ptrs=spans,
        new_ptrs=new,
        ring_ptrs=ring_ptrs,
        table_ptr=pools.req_to_token,
        table_rows_ptr=batch.req_pool_indices,
        slots_ptr=slots_R,
        out_ptr=features_RF,
        columns=pools.req_to_token.shape[1],
        max_len=max_len,
        width=width,
        FEATURES=num_features,
        BLOCK_R=block_r,
        BLOCK_F=block_f,
    )
    if ring_ptrs is not None:
        block_r = block_of(width, _ROWS, block_f)
        _keep_kernel[batch.size, ceil_div(width, block_r), ceil_div(num_features, block_f)](
            spans_ptrs=spans,
            ring_ptrs=ring_ptrs,
            table_rows_ptr=batch.req_pool_indices,
            features_ptr=features_RF,
            width=width,
            FEATURES=num_features,
            BLOCK_R=block_r,
            BLOCK_F=block_f,
        )
    return features_RF, slots_R
