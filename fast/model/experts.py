"""Products with the weights of the experts that rows chose, each weight streamed once."""

from typing import Literal, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.model.expert_blocks import ExpertBlocks
from specsim.fast.model.linear import Written
from specsim.fast.model.routing import Routes
from specsim.fast.model.rows import Norm, Rows, gated
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    dot_type,
    kernel,
    nearest,
    next_power_of_2,
    require_contiguous,
    stages_within,
)

Activation = Literal["silu", "clamped"]
_CLAMP = tl.constexpr(7.0)
_SLOPE = tl.constexpr(1.702)


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer, [E, out, in]."""

    gate_up: torch.Tensor  # [E, 2I, H], gates before ups
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2I]
    down_bias: torch.Tensor | None = None  # [E, H]


class _Factors(NamedTuple):
    x: torch.Tensor  # [rows, K]
    weight: torch.Tensor  # [E, N or 2N, K]
    bias: torch.Tensor | None  # [E, N or 2N]
    experts: torch.Tensor  # of ExpertBlocks
    pairs: torch.Tensor


@triton.jit
@no_type_check
def clamped(gate, up, DTYPE: tl.constexpr):
    """Compute (up + 1) · gate · σ(1.702 gate) with gate ≤ 7 and up in [-7, 7] (GPT-OSS)."""
    gate = tl.minimum(nearest(gate, DTYPE).to(tl.float32), _CLAMP)
    up = tl.minimum(tl.maximum(nearest(up, DTYPE).to(tl.float32), -_CLAMP), _CLAMP)
    return (up + 1.0) * gate / (1.0 + tl.exp(gate * -_SLOPE))


@kernel
@no_type_check
def _expert_kernel(
    out_ptr,
    factor_ptrs,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute outputs of one block of pairs, from row p // TOP_K, into row p of the output."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    block = tl.program_id(1)
    expert = tl.load(factor_ptrs.experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(factor_ptrs.pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask_m = pair >= 0
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    outputs: tl.constexpr = 2 * N if GATED else N
    weight_ptr = factor_ptrs.weight + expert * outputs * K
    x_ptrs = factor_ptrs.x + (tl.maximum(pair, 0) // TOP_K)[:, None] * K
    w_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * K
    first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for place in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = place + tl.arange(0, BLOCK_K)
        inside = (offs_k < K)[None, :]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & (EVEN | inside), other=0.0)  # [BLOCK_M, BLOCK_K]
        mask_w = EVEN | (mask_n[:, None] & inside)
        w = tl.load(w_ptrs + offs_k[None, :], mask=mask_w, other=0.0)
        first = tl.dot(x.to(DOT), w.to(DOT).T, first, input_precision="ieee")
        if GATED:
            w = tl.load(w_ptrs + N * K + offs_k[None, :], mask=mask_w, other=0.0)
            second = tl.dot(x.to(DOT), w.to(DOT).T, second, input_precision="ieee")
    if factor_ptrs.bias is not None:
        bias_ptr = factor_ptrs.bias + expert * outputs + offs_n
        first += tl.load(bias_ptr, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(bias_ptr + N, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        first = clamped(first, second, DTYPE) if CLAMPED else gated(first, second, DTYPE)
    out = out_ptr + pair[:, None] * N + offs_n[None, :]
    tl.store(out, nearest(first, DTYPE), mask=mask_m[:, None] & mask_n[None, :])


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: ExpertBlocks,
    num_pairs: int,
    top_k: int,
    activation: Activation | None,
) -> torch.Tensor:
    """Compute every pair's product with its expert, [pairs, N], gated where there is an activation."""
    require_contiguous(x=x, weight=weight, bias=bias)
    size = weight.shape[1] // (1 if activation is None else 2)
    inner = weight.shape[2]
    out = x.new_empty(num_pairs, size)
    # The fastest on an H200 for 1 and 16 rows of Qwen3-30B-A3B, GPT-OSS-20B and DeepSeek-V3.
    block_n, block_k, stages = (32, 128, 4 if activation else 6) if blocks.size <= 16 else (64, 64, 4)
    if INTERPRETED:
        block_n, block_k = min(64, max(16, next_power_of_2(size))), min(128, max(16, next_power_of_2(inner)))
    block_k = block_k * 2 // x.itemsize
    tiles = 1 if activation is None else 2
    _expert_kernel[ceil_div(size, block_n), len(blocks.experts)](
        out_ptr=out,
        factor_ptrs=_Factors(x, weight, bias, blocks.experts, blocks.pairs),
        TOP_K=top_k,
        N=size,
        K=inner,
        GATED=activation is not None,
        CLAMPED=activation == "clamped",
        EVEN=size % block_n == 0 and inner % block_k == 0,
        BLOCK_M=blocks.size,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages_within(stages, (blocks.size + tiles * block_n) * block_k * x.itemsize),
        DOT=dot_type(x.dtype),
        num_warps=2 if blocks.size <= 16 else 4,
    )
    return out


@kernel
@no_type_check
def _combine_kernel(
    out_ptrs,
    base_ptr,
    expert_ptr,
    weights_ptr,
    next_norm_ptr,
    num_rows,
    size,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the weighted outputs of a row's experts to its base, if any, and prepare the next norm."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs < size)[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    for each in tl.static_range(TOP_K):
        pair = row * TOP_K + each
        weight = tl.load(weights_ptr + pair, mask=mask_r, other=0.0)
        output = tl.load(expert_ptr + pair[:, None] * size + offs[None, :], mask=mask, other=0.0)
        total += output.to(tl.float32) * weight[:, None]
    x = nearest(total, DTYPE)
    if base_ptr is not None:
        base = tl.load(base_ptr + row[:, None] * STRIDE_BASE + offs[None, :], mask=mask, other=0.0).to(tl.float32)
        x = nearest(base + x.to(tl.float32), DTYPE)
    tl.store(out_ptrs.rows + row[:, None] * STRIDE_OUT + offs[None, :], x, mask=mask)
    if next_norm_ptr is not None:
        x = x.to(tl.float32)
        weight = tl.load(next_norm_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
        weighted = nearest(x * weight[None, :], DTYPE)
        tl.store(out_ptrs.weighted + row[:, None] * size + offs[None, :], weighted, mask=mask)
        tl.store(out_ptrs.squares + row, tl.sum(x * x, axis=1), mask=mask_r)


def _combine(
    base: torch.Tensor | None, outputs: torch.Tensor, routes: Routes, norm: Norm | None, out: torch.Tensor | None
) -> Rows:
    num_rows, top_k = routes.weights.shape
    size = outputs.shape[1]
    out = outputs.new_empty(num_rows, size) if out is None else out
    onto = Rows.to_write(out, norm, 1)
    block = block_of(num_rows, 1, size)
    _combine_kernel[(ceil_div(num_rows, block),)](
        out_ptrs=Written(out, onto.weighted, onto.squares),
        base_ptr=base,
        expert_ptr=outputs,
        weights_ptr=routes.weights,
        next_norm_ptr=onto.next_weight,
        num_rows=num_rows,
        size=size,
        STRIDE_OUT=out.stride(0),
        STRIDE_BASE=0 if base is None else base.stride(0),
        TOP_K=top_k,
        BLOCK_R=block,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return onto


def experts_onto(
    base: torch.Tensor | None,
    x: torch.Tensor,
    weights: ExpertWeights,
    routes: Routes,
    blocks: ExpertBlocks,
    activation: Activation,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> Rows:
    """Add Σ weight · down(gate x, up x) over each row's experts to base [R, H]; prepare the next norm.

    x: rows after the layer's norm. base: None is zeros. base and out may be slices of wider tensors. Outputs of a row's
    experts are added in the order of its routes, so that a row's result depends on no other row.
    """
    num_rows, top_k = routes.experts.shape
    num_pairs = num_rows * top_k
    grown = _product(x, weights.gate_up, weights.gate_up_bias, blocks, num_pairs, top_k, activation)
    outputs = _product(grown, weights.down, weights.down_bias, blocks, num_pairs, 1, None)
    return _combine(base, outputs, routes, norm, out)
