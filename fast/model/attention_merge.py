"""Merge of the parts in which attention reads a request's keys."""

from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.model.attention_plan import Plan
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, nearest

MOST_MERGES = 4096  # programs


class Parts(NamedTuple):
    """Partial results of requests whose keys are read in several parts."""

    acc: torch.Tensor  # f32 [parts, D], weighted sums of values of every part, head and pair of a row and a query head
    stats: torch.Tensor  # f32 [parts, 2], the largest logit and the sum of weights
    spans: torch.Tensor  # i32 [B, 2], a request's first part and its number of parts

    @classmethod
    def empty(cls, out: torch.Tensor, plan: Plan, num_requests: int) -> Self:
        """Allocate the parts of results [R, A, D]."""
        count = plan.units * plan.pairs * (out.shape[1] // plan.group)
        acc = out.new_empty(count, out.shape[2], dtype=torch.float32)
        return cls(acc, acc.new_empty(count, 2), acc.new_empty(num_requests, 2, dtype=torch.int32))


@triton.jit
@no_type_check
def store_part(parts_ptrs, first, acc, top, total, mask, mask_d, D: tl.constexpr):
    """Store a part's results of a block of pairs, [BLOCK_M] and [BLOCK_M, BLOCK_D], for the merge."""
    acc_ptr = parts_ptrs.acc + first * D
    stats_ptr = parts_ptrs.stats + 2 * first
    pair = tl.arange(0, acc.shape[0])
    tl.store(acc_ptr + pair[:, None] * D + tl.arange(0, acc.shape[1])[None, :], acc, mask=mask_d)
    tl.store(stats_ptr + 2 * pair, top, mask=mask)
    tl.store(stats_ptr + 2 * pair + 1, total, mask=mask)


@kernel
@no_type_check
def _merge_kernel(
    out_ptr,
    parts_ptrs,
    row_starts_ptr,
    pairs,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of every row and head, always in order, for requests with several parts."""
    await_input(PDL)
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    request = tl.program_id(1).to(tl.int64)
    kept = tl.load(parts_ptrs.spans + 2 * request)
    num_splits = tl.load(parts_ptrs.spans + 2 * request + 1)
    low = tl.load(row_starts_ptr + request)
    high = tl.load(row_starts_ptr + request + 1)
    if num_splits == 1:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    for start in range(tl.program_id(2) * BLOCK_R, pairs, tl.num_programs(2) * BLOCK_R):
        pair = start + tl.arange(0, BLOCK_R)
        row = low + pair // GROUP
        mask = row < high
        total = tl.zeros([BLOCK_R], tl.float32)
        top = tl.full([BLOCK_R], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for first in range(0, num_splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            part = ((kept + split).to(tl.int64)[None, :] * heads + head) * pairs + pair[:, None]
            mask_s = mask[:, None] & (split < num_splits)[None, :]
            part_top = tl.load(parts_ptrs.stats + 2 * part, mask=mask_s, other=float("-inf"))
            part_total = tl.load(parts_ptrs.stats + 2 * part + 1, mask=mask_s, other=0.0)
            mask_p = mask_s[:, :, None] & mask_d[None, None, :]
            part_ptr = parts_ptrs.acc + part[:, :, None] * D + offs_d[None, None, :]
            parts = tl.load(part_ptr, mask=mask_p, other=0.0)  # [BLOCK_R, BLOCK_S, BLOCK_D]
            higher = tl.maximum(top, tl.max(part_top, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(part_top - shift[:, None])
            before = tl.exp2(top - shift)
            acc = acc * before[:, None] + tl.sum(parts * weight[:, :, None], axis=1)
            total = total * before + tl.sum(part_total * weight, axis=1)
            top = higher
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        address = ((row * heads + head) * GROUP + pair % GROUP)[:, None] * D + offs_d[None, :]
        tl.store(out_ptr + address, nearest(out, out_ptr.dtype.element_ty), mask=mask[:, None] & mask_d[None, :])


def merge(out: torch.Tensor, parts: Parts, metadata: AttentionMetadata, plan: Plan) -> None:
    """Merge the parts of every request into its results, [R, A, D]."""
    num_requests = len(parts.spans)
    heads = out.shape[1] // plan.group
    few = plan.pairs < 128
    has_many_parts = plan.units > 8 * num_requests
    block_s = max(1, (2048 if few or has_many_parts else 1024) // plan.block_d)
    block_r = block_of(plan.pairs, 1 if few else 4, block_s * plan.block_d)
    blocks = min(ceil_div(plan.pairs, block_r), ceil_div(MOST_MERGES, heads * num_requests))
    _merge_kernel[heads, num_requests, blocks](
        out_ptr=out,
        parts_ptrs=parts,
        row_starts_ptr=metadata.row_starts,
        pairs=plan.pairs,
        GROUP=plan.group,
        D=out.shape[2],
        BLOCK_R=block_r,
        BLOCK_S=block_s,
        BLOCK_D=plan.block_d,
        num_warps=2 if few else 8 if has_many_parts else 4,
    )
