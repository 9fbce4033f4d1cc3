"""The rows the drafter reads after prefill and after verify: tokens one place ahead of their features."""

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, Verdict
from specsim.fast.runtime.launch import await_input, block_of, kernel, require_contiguous

_TOKENS = 1024
_REQUESTS = 128
_FEATURES = 4096


@kernel
def _shift_left_kernel(input_ids_ptr, row_starts_ptr, next_tokens_ptr, out_ptr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    low, high = tl.load(row_starts_ptr + request), tl.load(row_starts_ptr + request + 1)
    last = tl.load(next_tokens_ptr + request).to(tl.int64)
    for start in range(low, high, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        shifted = tl.load(input_ids_ptr + rows + 1, mask=rows + 1 < high, other=0)
        tl.store(out_ptr + rows, tl.where(rows + 1 < high, shifted, last), mask=rows < high)


def shift_left(prefill: PrefillInput, next_tokens: torch.Tensor) -> torch.Tensor:
    """Drafter ids after prefill, i64 [R]: ids without the first, then the token after the chunk (sglang#26329)."""
    shifted, batch_size = torch.empty_like(prefill.input_ids), len(prefill.start_lens)
    _shift_left_kernel[(batch_size,)](
        prefill.input_ids, prefill.row_starts, next_tokens, shifted, BLOCK=block_of(len(shifted), _TOKENS)
    )
    return shifted


@kernel
def _requests_kernel(
    req_pool_indices_ptr, seq_lens_ptr, num_accepted_drafts_ptr, num_accepted_tokens_ptr, predict_ptr, accept_index_ptr,
    row_starts_ptr, out_rows_ptr, out_lens_ptr, out_drafts_ptr, out_tokens_ptr, bonus_tokens_ptr, batch_size, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What is handed on of every request, and the ends of its rows."""
    await_input(PDL)
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = request < batch_size
    row = tl.load(req_pool_indices_ptr + request, mask=mask, other=-1)
    drafts = tl.load(num_accepted_drafts_ptr + request, mask=mask)
    tokens = tl.load(num_accepted_tokens_ptr + request, mask=mask)
    real = mask & (row >= 0)
    node = tl.load(accept_index_ptr + request * width + drafts, mask=real, other=-1)
    bonus = tl.load(predict_ptr + node, mask=real & (node >= 0), other=0)
    tl.store(row_starts_ptr + request, request * width, mask=request <= batch_size)
    tl.store(out_rows_ptr + request, row, mask=mask)
    tl.store(out_lens_ptr + request, tl.load(seq_lens_ptr + request, mask=mask), mask=mask)
    tl.store(out_drafts_ptr + request, drafts, mask=mask)
    tl.store(out_tokens_ptr + request, tokens, mask=mask)
    tl.store(bonus_tokens_ptr + request, bonus, mask=mask)


@kernel
def _rows_kernel(
    req_pool_indices_ptr, seq_lens_ptr, num_accepted_tokens_ptr, predict_ptr, accept_index_ptr, req_to_token_ptr,
    features_ptr, input_ids_ptr, positions_ptr, cache_locations_ptr, hidden_ptr, num_rows, width, num_columns,
    max_len, RAGGED: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`width` rows a request; programs of one row block share out the features."""
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request, step, mask = rows // width, rows % width, rows < num_rows
    row = tl.load(req_pool_indices_ptr + request, mask=mask, other=-1)
    real = mask & (row >= 0)
    live = real & (step < tl.load(num_accepted_tokens_ptr + request, mask=mask, other=0))
    node = tl.load(accept_index_ptr + rows, mask=live, other=-1).to(tl.int64)
    root = tl.load(accept_index_ptr + request * width, mask=real, other=0).to(tl.int64)
    source = tl.where(node >= 0, node, root)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_offs = offs < FEATURES
    features = tl.load(features_ptr + source * FEATURES + offs, mask=real & mask_offs, other=0.0)
    tl.store(hidden_ptr + rows * FEATURES + offs, features, mask=mask & mask_offs)
    if tl.program_id(1) == 0:
        position = tl.where(real, tl.load(seq_lens_ptr + request, mask=mask, other=0) + step, 0)
        writes = (live if RAGGED else real) & (position < max_len) & (position < num_columns)
        slot = tl.load(req_to_token_ptr + row * num_columns + position, mask=writes, other=-1)
        ids = tl.load(predict_ptr + node, mask=live & (node >= 0), other=0)
        tl.store(input_ids_ptr + rows, ids.to(tl.int64), mask=mask)
        tl.store(positions_ptr + rows, position, mask=mask)
        tl.store(cache_locations_ptr + rows, slot, mask=mask)


def draft_extend_input(
    batch: Batch,
    verdict: Verdict,
    features_RF: torch.Tensor,
    req_to_token: torch.Tensor,
    max_len: int,
    extend: str,
    out: DraftExtendInput | None = None,
) -> DraftExtendInput:
    """Gather along the accepted path into S+1 rows of every request, whatever `extend` is.

    Row j holds the token *after* node accept_index[b, j] and that node's features; a row past the path carries token 0
    and the features of node 0, and under `ragged` writes nothing. A row that has no slot, or stands at or beyond
    max_len, writes nothing. A padded request's rows are zeros that write nothing.
    """
    require_contiguous(features_RF=features_RF, req_to_token=req_to_token, accept_index=verdict.accept_index)
    batch_size, width = verdict.accept_index.shape
    rows = out or _empty(batch_size, width, features_RF)
    requests = block_of(batch_size + 1, _REQUESTS)
    _requests_kernel[(triton.cdiv(batch_size + 1, requests),)](
        batch.req_pool_indices, batch.seq_lens, verdict.num_accepted_drafts, verdict.num_accepted_tokens,
        verdict.predict, verdict.accept_index, rows.row_starts, rows.req_pool_indices, rows.seq_lens,
        rows.num_accepted_drafts, rows.num_accepted_tokens, rows.bonus_tokens, batch_size, width, BLOCK=requests,
    )  # fmt: skip
    num_rows, num_features = rows.hidden.shape
    block = block_of(num_features, _FEATURES)
    row_block = block_of(num_rows, 1, block)
    _rows_kernel[(triton.cdiv(num_rows, row_block), triton.cdiv(max(num_features, 1), block))](
        batch.req_pool_indices, batch.seq_lens, verdict.num_accepted_tokens, verdict.predict, verdict.accept_index,
        req_to_token, features_RF, rows.input_ids, rows.positions, rows.cache_locations, rows.hidden, num_rows, width,
        req_to_token.shape[1], max_len, RAGGED=extend == "ragged", FEATURES=num_features, ROWS=row_block, BLOCK=block,
    )  # fmt: skip
    return rows


def _empty(batch_size: int, width: int, features_RF: torch.Tensor) -> DraftExtendInput:
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
