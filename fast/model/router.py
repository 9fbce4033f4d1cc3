"""Router of experts for few rows: the norm and the logits in one kernel."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.model.rows import Rows, normalised
from specsim.fast.runtime.launch import (
    await_predecessor,
    block_of,
    ceil_div,
    kernel,
    let_successor_begin,
    next_power_of_2,
    require_contiguous,
)

FEW_ROWS = 16  # every program computes a row's norm again


@kernel
@no_type_check
def _router_kernel(
    out_ptr,
    logits_ptr,
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    size,
    eps,
    stride_x,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of some experts for one row; the first program of a row writes it under its norm."""
    row = tl.program_id(1).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask = offs < size
    mask_e = expert < E
    weight = tl.load(
        weight_ptr + expert[:, None] * size + offs[None, :], mask=mask_e[:, None] & mask[None, :], other=0.0
    )
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + offs, mask=mask, other=0.0)
    await_predecessor(PDL)
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
        x = normalised(x, scale, norm, out_ptr.dtype.element_ty)
    let_successor_begin(PDL)
    logits = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, mask=mask_e, other=0.0).to(tl.float32)
    tl.store(logits_ptr + row * E + expert, logits, mask=mask_e)
    if tl.program_id(0) == 0:
        tl.store(out_ptr + row * size + offs, x, mask=mask)


def normed_and_logits(
    rows: Rows, weight_EH: torch.Tensor, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rows' norm, [R, H], and compute the router's logits of the outcome, f32 [R, E]."""
    x, norm = rows.values, rows.norm
    require_contiguous(weight_EH=weight_EH, bias_E=bias_E)
    if x.stride(-1) != 1:
        raise ValueError(f"rows have strides {x.stride()}; allowed: 1 along the last dimension")
    num_rows, size = x.shape
    num_experts = len(weight_EH)
    out = x.new_empty(num_rows, size)
    logits = x.new_empty(num_rows, num_experts, dtype=torch.float32)
    block_h = next_power_of_2(size)
    block_e = block_of(num_experts, 1, block_h)
    _router_kernel[ceil_div(num_experts, block_e), num_rows](
        out_ptr=out,
        logits_ptr=logits,
        x_ptr=x,
        norm_ptr=None if norm is None else norm.weight,
        weight_ptr=weight_EH,
        bias_ptr=bias_E,
        size=size,
        eps=rows.eps,
        stride_x=x.stride(0),
        E=num_experts,
        BLOCK_E=block_e,
        BLOCK_H=block_h,
        num_warps=8 if size > 2048 else 4,
    )
    return out, logits
