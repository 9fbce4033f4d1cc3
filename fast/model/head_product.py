"""Products of every head's channels with a weight of that head."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    ceil_div,
    dot_type,
    kernel,
    nearest,
    next_power_of_2,
    stages_within,
)


@kernel
@no_type_check
def _head_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_rows,
    STRIDES_OUT: tl.constexpr,
    STRIDES_X: tl.constexpr,
    STRIDES_W: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = (offs_m < num_rows)[:, None]
    mask_n = (offs_n < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_ptr += head * STRIDES_X[1]
    weight_ptr += head * STRIDES_W[0]
    for place in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = place + tl.arange(0, BLOCK_K)
        inside = offs_k < K
        x = tl.load(x_ptr + offs_m[:, None] * STRIDES_X[0] + offs_k[None, :], mask=mask_m & inside[None, :], other=0.0)
        address = offs_k[:, None] * STRIDES_W[2] + offs_n[None, :] * STRIDES_W[1]
        w = tl.load(weight_ptr + address, mask=inside[:, None] & mask_n, other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x.to(DOT), w.to(DOT), acc, input_precision="ieee")
    address = offs_m[:, None] * STRIDES_OUT[0] + head * STRIDES_OUT[1] + offs_n[None, :]
    tl.store(out_ptr + address, nearest(acc, out_ptr.dtype.element_ty), mask=mask_m & mask_n)


def head_product(x_RAK: torch.Tensor, weight_ANK: torch.Tensor, out_RAN: torch.Tensor) -> None:
    """Compute Σ x[r, a, k] · weight[a, n, k] into out[r, a, n].

    All may be slices of wider tensors, and the weight transposed; only the last channels of x and out are adjacent. A
    row's result does not depend on the number of rows.
    """
    if x_RAK.stride(-1) != 1 or out_RAN.stride(-1) != 1:
        raise ValueError(f"strides are {x_RAK.stride()} and {out_RAN.stride()}; allowed: 1 along the last dimension")
    num_rows, heads, inner = x_RAK.shape
    size = weight_ANK.shape[1]
    block_m = max(16, min(64, next_power_of_2(num_rows)))
    block_n, block_k = (min(128, max(16, next_power_of_2(size))), 128) if INTERPRETED else (64, 64)
    block_k = min(max(16, next_power_of_2(inner)), block_k * 2 // x_RAK.itemsize)
    _head_kernel[ceil_div(size, block_n), heads, ceil_div(num_rows, block_m)](
        out_ptr=out_RAN,
        x_ptr=x_RAK,
        weight_ptr=weight_ANK,
        num_rows=num_rows,
        STRIDES_OUT=out_RAN.stride(),
        STRIDES_X=x_RAK.stride(),
        STRIDES_W=weight_ANK.stride(),
        N=size,
        K=inner,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages_within(3, (block_m + block_n) * block_k * x_RAK.itemsize),
        DOT=dot_type(x_RAK.dtype),
        num_warps=4,
    )
