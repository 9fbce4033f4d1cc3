"""Sums over ranks: every rank gathers all parts and adds them in the order of the ranks.

So a result has the same bits on every rank, whatever library gathers.
"""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.rank_group import RankGroup
from specsim.fast.model.rows import Norm, Rows
from specsim.fast.runtime.gather import parts_of
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, nearest, next_power_of_2


@kernel
@no_type_check
def _sum_kernel(
    out_ptr,
    weighted_ptr,
    squares_ptr,
    parts_ptrs,
    base_ptr,
    norm_ptr,
    num_rows,
    size,
    stride_out,
    stride_base,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of some rows in the order of the ranks, then the base, and prepare the next norm."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs < size)
    place = row[:, None] * size + offs
    if parts_ptrs.epochs is not None:
        epoch = tl.load(parts_ptrs.epochs)
        place += (epoch & 1).to(tl.int64) * parts_ptrs.half
        if tl.program_id(0) == 0:
            tl.store(parts_ptrs.epochs + 1, epoch + 1)
    total = tl.load(parts_ptrs.of_rank[0] + place, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_H]
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts_ptrs.of_rank[rank] + place, mask=mask, other=0.0).to(tl.float32)
    total = nearest(total, DTYPE).to(tl.float32)
    if base_ptr is not None:
        base = tl.load(base_ptr + row[:, None] * stride_base + offs, mask=mask, other=0.0).to(tl.float32)
        total = nearest(base + total, DTYPE).to(tl.float32)
    tl.store(out_ptr + row[:, None] * stride_out + offs, nearest(total, DTYPE), mask=mask)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
        tl.store(weighted_ptr + row[:, None] * size + offs, nearest(total * weight, DTYPE), mask=mask)
        tl.store(squares_ptr + row, tl.sum(total * total, axis=1), mask=mask_r)


def sum_onto(
    ranks: RankGroup,
    base: torch.Tensor | None,
    part_RH: torch.Tensor,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> Rows:
    """Compute base + Σ parts over ranks, [R, H], and prepare the next norm.

    base and out may be slices of wider tensors.
    """
    parts = parts_of(ranks, part_RH)
    num_rows, size = part_RH.shape
    out = part_RH.new_empty(num_rows, size) if out is None else out
    onto = Rows.to_write(out, norm, 1)
    block = block_of(num_rows, 1, size)
    _sum_kernel[(ceil_div(num_rows, block),)](
        out_ptr=out,
        weighted_ptr=onto.weighted,
        squares_ptr=onto.squares,
        parts_ptrs=parts,
        base_ptr=base,
        norm_ptr=onto.next_weight,
        num_rows=num_rows,
        size=size,
        stride_out=out.stride(0),
        stride_base=0 if base is None else base.stride(0),
        RANKS=ranks.size,
        BLOCK_R=block,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return onto
