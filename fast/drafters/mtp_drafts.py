"""Tokens that MTP modules read, the hidden states that drafts come from, and the drafts as children of lanes."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.mtp import MtpInput
from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.fast.drafters.mtp_rows import Spans, SpanShape
from specsim.fast.model.metadata import known_token
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2


@kernel
@no_type_check
def _ids_kernel(
    spans_ptrs,
    token_ids_ptr,
    table_rows_ptr,
    topk_index_ptr,
    out_ptr,
    depth,
    token_columns,
    num_steps,
    topk,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the ids that one depth's module reads: known tokens, and the first lane's drafts after them."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows_ptr + request)
    end = tl.load(spans_ptrs.end_lens + request)
    low = tl.load(spans_ptrs.row_starts + request)
    rows = low + tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mask = rows < tl.load(spans_ptrs.row_starts + request + 1)
    column = tl.load(spans_ptrs.first_lens + request) + rows - low
    live = mask & (row >= 0) & (column < end)
    token = column + 1 + depth
    unknown = tl.maximum(token - end, 0)  # 1 for the first draft
    committed = known_token(token_ids_ptr, token_columns, row, token, mask=live & (unknown == 0))
    draft = topk_index_ptr + (request * num_steps + unknown - 1) * topk
    drafted = tl.load(draft, mask=live & (unknown > 0), other=0)
    tl.store(out_ptr + rows, tl.where(unknown > 0, drafted, committed), mask=mask)


@kernel
@no_type_check
def _last_kernel(
    spans_ptrs,
    hidden_ptr,
    last_ptr,
    out_ptr,
    depth,
    num_steps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the hidden state of a request's last row, to a depth's entry of the draft input too."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(spans_ptrs.end_lens + request) - tl.load(spans_ptrs.first_lens + request)
    last_row = tl.load(spans_ptrs.row_starts + request) + tl.maximum(count, 1) - 1
    offs = tl.arange(0, BLOCK)
    values = tl.load(hidden_ptr + last_row * SIZE + offs, mask=offs < SIZE)
    tl.store(last_ptr + request * SIZE + offs, values, mask=offs < SIZE)
    tl.store(out_ptr + (request * num_steps + depth) * SIZE + offs, values, mask=offs < SIZE)


@kernel
@no_type_check
def _children_kernel(
    step_ptr,
    topk_scores_ptr,
    topk_index_ptr,
    scores_ptr,
    tokens_ptr,
    num_children,
    topk,
    per_lane,
    num_steps,
    SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the drafts of the next depth to every lane: all K of them, or the lane's own sampled one."""
    await_input(PDL)
    depth = tl.minimum(tl.load(step_ptr) + 1, num_steps - 1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < num_children
    lane = offs // per_lane % topk
    request = offs // (per_lane * topk)
    entry = (request * num_steps + depth) * topk + (lane if SAMPLED else offs % per_lane)
    tl.store(scores_ptr + offs, tl.load(topk_scores_ptr + entry, mask=mask), mask=mask)
    tl.store(tokens_ptr + offs, tl.load(topk_index_ptr + entry, mask=mask), mask=mask)


def ids_of(batch: Batch, spans: Spans, shape: SpanShape, depth: int, drafts: MtpInput, pools: KVPool) -> torch.Tensor:
    """Find the ids i64 [R] that a module reads: token p+1+depth, or the first lane's draft of it."""
    ids_R = batch.seq_lens.new_empty(shape.num_rows)
    block = block_of(shape.most_rows, 128)
    _ids_kernel[batch.size, ceil_div(shape.most_rows, block)](
        spans_ptrs=spans,
        token_ids_ptr=pools.token_ids,
        table_rows_ptr=batch.req_pool_indices,
        topk_index_ptr=drafts.topk_index,
        out_ptr=ids_R,
        depth=depth,
        token_columns=pools.token_ids.shape[1],
        num_steps=drafts.topk_index.shape[1],
        topk=drafts.topk_index.shape[2],
        BLOCK_R=block,
    )
    return ids_R


def last_hidden(spans: Spans, hidden_RH: torch.Tensor, depth: int, drafts: MtpInput) -> torch.Tensor:
    """Copy every request's last hidden state, [B, H], and put it into the draft input."""
    size, num_steps, hidden_size = drafts.hidden.shape
    last_BH = hidden_RH.new_empty(size, hidden_size)
    _last_kernel[(size,)](
        spans_ptrs=spans,
        hidden_ptr=hidden_RH,
        last_ptr=last_BH,
        out_ptr=drafts.hidden,
        depth=depth,
        num_steps=num_steps,
        SIZE=hidden_size,
        BLOCK=next_power_of_2(hidden_size),
    )
    return last_BH


def children(
    step: torch.Tensor, topk_scores_BSK: torch.Tensor, topk_index_BSK: torch.Tensor, config: SpecConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every lane the drafts of the next depth: (scores, ids), [B, K, K].

    The step's number is read on the device.

    A lane of sampled drafts has one child, [B, K, 1].
    """
    size, num_steps, topk = topk_index_BSK.shape
    per_lane = 1 if config.is_sampled else topk
    scores = topk_scores_BSK.new_empty(size, topk, per_lane)
    tokens = topk_index_BSK.new_empty(size, topk, per_lane)
    block = block_of(tokens.numel(), 256)
    _children_kernel[(ceil_div(tokens.numel(), block),)](
        step_ptr=step,
        topk_scores_ptr=topk_scores_BSK,
        topk_index_ptr=topk_index_BSK,
        scores_ptr=scores,
        tokens_ptr=tokens,
        num_children=tokens.numel(),
        topk=topk,
        per_lane=per_lane,
        num_steps=num_steps,
        SAMPLED=config.is_sampled,
        BLOCK=block,
    )
    return scores, tokens
