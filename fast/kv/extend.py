"""Rows of the drafter after prefill and verify: each token with the features of the position before it."""

from collections import namedtuple
from dataclasses import fields, replace
from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, Verdict
from specsim.fast.model.metadata import slot_of
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, require_contiguous

_TOKENS = 1024
_REQUESTS = 128
_FEATURES = 4096


@kernel
@no_type_check
def _shift_left_kernel(input_ids_ptr, row_starts_ptr, next_tokens_ptr, out_ptr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    low = tl.load(row_starts_ptr + request)
    high = tl.load(row_starts_ptr + request + 1)
    last = tl.load(next_tokens_ptr + request).to(tl.int64)
    for start in range(low, high, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        shifted = tl.load(input_ids_ptr + rows + 1, mask=rows + 1 < high, other=0)
        tl.store(out_ptr + rows, tl.where(rows + 1 < high, shifted, last), mask=rows < high)


def shift_left(prefill: PrefillInput, next_tokens: torch.Tensor) -> torch.Tensor:
    """Shift the ids of each chunk left by one, i64 [R], and append the token after the chunk (sglang#26329)."""
    shifted = torch.empty_like(prefill.input_ids)
    batch_size = len(prefill.start_lens)
    _shift_left_kernel[(batch_size,)](
        input_ids_ptr=prefill.input_ids,
        row_starts_ptr=prefill.row_starts,
        next_tokens_ptr=next_tokens,
        out_ptr=shifted,
        BLOCK=block_of(len(shifted), _TOKENS),
    )
    return shifted


@kernel
@no_type_check
def _append_kernel(input_ids_ptr, row_starts_ptr, next_tokens_ptr, out_ptr, out_starts_ptr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    low = tl.load(row_starts_ptr + request)
    high = tl.load(row_starts_ptr + request + 1)
    last = tl.load(next_tokens_ptr + request).to(tl.int64)
    tl.store(out_starts_ptr + request, low + request)
    tl.store(out_starts_ptr + request + 1, high + request + 1)
    for start in range(low, high + 1, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        ids = tl.load(input_ids_ptr + rows, mask=rows < high, other=0)
        tl.store(out_ptr + rows + request, tl.where(rows < high, ids, last), mask=rows <= high)


def draft_rows(prefill: PrefillInput, next_tokens: torch.Tensor, bonus_columns: int) -> PrefillInput:
    """Rows of the drafter after a prefill.

    Without a bonus column each column has the token after it. With one, each has its own token, and a request has one
    row more, the token after its chunk.
    """
    if bonus_columns == 0:
        return replace(prefill, input_ids=shift_left(prefill, next_tokens))
    batch_size = len(prefill.start_lens)
    input_ids = prefill.input_ids.new_empty(len(prefill.input_ids) + batch_size)
    row_starts = torch.zeros_like(prefill.row_starts)
    _append_kernel[(batch_size,)](
        input_ids_ptr=prefill.input_ids,
        row_starts_ptr=prefill.row_starts,
        next_tokens_ptr=next_tokens,
        out_ptr=input_ids,
        out_starts_ptr=row_starts,
        BLOCK=block_of(len(input_ids), _TOKENS),
    )
    max_rows = None if prefill.max_rows is None else prefill.max_rows + 1
    return replace(prefill, input_ids=input_ids, row_starts=row_starts, max_rows=max_rows)


# Tensors of a verdict and of a DraftExtendInput as kernel arguments.
VerdictTensors = namedtuple("VerdictTensors", [field.name for field in fields(Verdict)])
ExtendTensors = namedtuple("ExtendTensors", [field.name for field in fields(DraftExtendInput)])


@kernel
@no_type_check
def _requests_kernel(
    req_pool_indices_ptr,
    seq_lens_ptr,
    verdict_ptrs,
    out_ptrs,
    batch_size,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy every request's entries, and write where its rows end."""
    await_input(PDL)
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = request < batch_size
    row = tl.load(req_pool_indices_ptr + request, mask=mask, other=-1)
    drafts = tl.load(verdict_ptrs.num_accepted_drafts + request, mask=mask)
    tokens = tl.load(verdict_ptrs.num_accepted_tokens + request, mask=mask)
    real = mask & (row >= 0)
    node = tl.load(verdict_ptrs.accept_index + request * width + drafts, mask=real, other=-1)
    bonus = tl.load(verdict_ptrs.predict + node, mask=real & (node >= 0), other=0)
    tl.store(out_ptrs.row_starts + request, request * width, mask=request <= batch_size)
    tl.store(out_ptrs.req_pool_indices + request, row, mask=mask)
    tl.store(out_ptrs.seq_lens + request, tl.load(seq_lens_ptr + request, mask=mask), mask=mask)
    tl.store(out_ptrs.num_accepted_drafts + request, drafts, mask=mask)
    tl.store(out_ptrs.num_accepted_tokens + request, tokens, mask=mask)
    tl.store(out_ptrs.bonus_tokens + request, bonus, mask=mask)


@kernel
@no_type_check
def _rows_kernel(
    req_pool_indices_ptr,
    seq_lens_ptr,
    verdict_ptrs,
    out_ptrs,
    req_to_token_ptr,
    features_ptr,
    num_rows,
    width,
    num_columns,
    max_len,
    bonus_columns,
    RAGGED: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write `width` rows for each request.

    Programs of one row block share the copy of the features.
    """
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request = rows // width
    step = rows % width
    mask = rows < num_rows
    row = tl.load(req_pool_indices_ptr + request, mask=mask, other=-1)
    real = mask & (row >= 0)
    live = real & (step < tl.load(verdict_ptrs.num_accepted_tokens + request, mask=mask, other=0))
    node = tl.load(verdict_ptrs.accept_index + rows, mask=live, other=-1).to(tl.int64)
    root = tl.load(verdict_ptrs.accept_index + request * width, mask=real, other=0).to(tl.int64)
    source = tl.where(node >= 0, node, root)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_offs = offs < FEATURES
    features = tl.load(features_ptr + source * FEATURES + offs, mask=real & mask_offs, other=0.0)
    tl.store(out_ptrs.hidden + rows * FEATURES + offs, features, mask=mask & mask_offs)
    if tl.program_id(1) == 0:
        position = tl.where(real, tl.load(seq_lens_ptr + request, mask=mask, other=0) + bonus_columns + step, 0)
        writes = (live if RAGGED else real) & (position < max_len)
        slot = slot_of(req_to_token_ptr, num_columns, row, position, mask=writes)
        ids = tl.load(verdict_ptrs.predict + node, mask=live & (node >= 0), other=0)
        tl.store(out_ptrs.input_ids + rows, ids.to(tl.int64), mask=mask)
        tl.store(out_ptrs.positions + rows, position, mask=mask)
        tl.store(out_ptrs.cache_locations + rows, slot, mask=mask)


def draft_extend_input(
    batch: Batch,
    verdict: Verdict,
    features_RF: torch.Tensor,
    req_to_token: torch.Tensor,
    max_len: int,
    extend: str,
    bonus_columns: int = 0,
    *,
    out: DraftExtendInput | None = None,
) -> DraftExtendInput:
    """Gather along the accepted path into S+1 rows of every request, whatever `extend` is.

    Row j has the token *after* node accept_index[b, j] and that node's features. A row past the path has token 0 and
    the features of node 0, and under `ragged` writes nothing. Neither does a row without a slot, or at or beyond
    max_len. A padded request's rows are zeros that write nothing. Row j stands in column L + bonus_columns + j.
    """
    require_contiguous(features_RF=features_RF, req_to_token=req_to_token, accept_index=verdict.accept_index)
    batch_size, width = verdict.accept_index.shape
    rows = out or empty_extend_input(batch_size, width, features_RF)
    requests = block_of(batch_size + 1, _REQUESTS)
    verdict_ptrs = VerdictTensors._make(getattr(verdict, name) for name in VerdictTensors._fields)
    out_ptrs = ExtendTensors._make(getattr(rows, name) for name in ExtendTensors._fields)
    _requests_kernel[(ceil_div(batch_size + 1, requests),)](
        req_pool_indices_ptr=batch.req_pool_indices,
        seq_lens_ptr=batch.seq_lens,
        verdict_ptrs=verdict_ptrs,
        out_ptrs=out_ptrs,
        batch_size=batch_size,
        width=width,
        BLOCK=requests,
    )
    num_rows, num_features = rows.hidden.shape
    block = block_of(num_features, _FEATURES)
    row_block = block_of(num_rows, 1, block)
    _rows_kernel[(ceil_div(num_rows, row_block), ceil_div(max(num_features, 1), block))](
        req_pool_indices_ptr=batch.req_pool_indices,
        seq_lens_ptr=batch.seq_lens,
        verdict_ptrs=verdict_ptrs,
        out_ptrs=out_ptrs,
        req_to_token_ptr=req_to_token,
        features_ptr=features_RF,
        num_rows=num_rows,
        width=width,
        num_columns=req_to_token.shape[1],
        max_len=max_len,
        bonus_columns=bonus_columns,
        RAGGED=extend == "ragged",
        FEATURES=num_features,
        ROWS=row_block,
        BLOCK=block,
    )
    return rows


def empty_extend_input(batch_size: int, width: int, features_RF: torch.Tensor) -> DraftExtendInput:
    """Allocate `width` rows for each request, with features like these."""

    def table(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(length, dtype=dtype, device=features_RF.device)

    return DraftExtendInput(
        row_starts=table(batch_size + 1),
        hidden=features_RF.new_empty(batch_size * width, features_RF.shape[1]),
        input_ids=table(batch_size * width),
        positions=table(batch_size * width),
        cache_locations=table(batch_size * width),
        num_accepted_drafts=table(batch_size, torch.int32),
        num_accepted_tokens=table(batch_size, torch.int32),
        bonus_tokens=table(batch_size, torch.int32),
        seq_lens=table(batch_size),
        req_pool_indices=table(batch_size),
    )
