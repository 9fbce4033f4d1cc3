"""Products with the weights of the experts that rows chose, each weight streamed once for a block of rows."""

from typing import Literal, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.model.routing import Routes
from specsim.fast.model.rows import HiddenRows, Norm, gated, store_sums
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

_CHUNK = 256  # pairs that are read at a time
Activation = Literal["silu", "clamped"]
_CLAMP = tl.constexpr(7.0)
_SLOPE = tl.constexpr(1.702)


class ExpertBlocks(NamedTuple):
    """Blocks of pairs with the same expert, each with room for `size` pairs.

    Pair p is row p // k of the rows and choice p % k of its k experts. Experts are in order, and the pairs of one.
    """

    experts: torch.Tensor  # i32 [blocks], -1 for an empty block; those come last
    pairs: torch.Tensor  # i32 [blocks, size], -1 beyond a block's last pair
    size: int


@kernel
@no_type_check
def _blocks_kernel(
    experts_ptr,
    pairs_ptr,
    chosen_ptr,
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the blocks of one expert; a program more than there are experts writes the empty ones."""
    await_input(PDL)
    program = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    offs_c = tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        mask = start + offs_c < num_pairs
        chosen = tl.load(chosen_ptr + start + offs_c, mask=mask, other=BLOCK_E - 1).to(tl.int32)
        counts += tl.histogram(chosen, BLOCK_E)
    # Entries of a last chunk that is not full were counted at an expert that does not exist.
    blocks = tl.where(offs_e < E, (counts + SIZE - 1) // SIZE, 0)
    first = tl.sum(tl.where(offs_e < program, blocks, 0), axis=0)
    count = tl.sum(tl.where(offs_e == program, blocks, 0), axis=0)
    if program == E:
        count = num_blocks - first
    offs_s = tl.arange(0, SIZE)
    expert = tl.where(program < E, program, -1)
    for block in range(first, first + count):
        tl.store(experts_ptr + block, expert)
    if program < E:
        held = 0
        for start in range(0, num_pairs, CHUNK):
            mask = start + offs_c < num_pairs
            chosen = tl.load(chosen_ptr + start + offs_c, mask=mask, other=-1).to(tl.int32)
            is_routed = (chosen == program).to(tl.int32)
            entry = first * SIZE + held + tl.cumsum(is_routed, axis=0) - 1
            tl.store(pairs_ptr + entry, start + offs_c, mask=is_routed > 0)
            held += tl.sum(is_routed, axis=0)
        if count > 0:
            last = (first + count - 1) * SIZE + offs_s
            tl.store(pairs_ptr + last, -1, mask=last >= first * SIZE + held)


def expert_blocks(experts_Rk: torch.Tensor, num_experts: int, size: int) -> ExpertBlocks:
    """Gather pairs of rows and experts, i16 [R, k], into blocks of `size`, as many as any choice may need."""
    require_contiguous(experts_Rk=experts_Rk)
    num_pairs = experts_Rk.numel()
    num_blocks = min(num_pairs, num_experts) + num_pairs // size
    experts = experts_Rk.new_empty(num_blocks, dtype=torch.int32)
    pairs = experts_Rk.new_empty(num_blocks, size, dtype=torch.int32)
    _blocks_kernel[(num_experts + 1,)](
        experts_ptr=experts,
        pairs_ptr=pairs,
        chosen_ptr=experts_Rk,
        num_pairs=num_pairs,
        num_blocks=num_blocks,
        E=num_experts,
        SIZE=size,
        BLOCK_E=max(16, next_power_of_2(num_experts + 1)),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return ExpertBlocks(experts, pairs, size)


def block_size(num_pairs: int, num_experts: int) -> int:
    """Choose the pairs of a block: twice an expert's average, from 16 to 128."""
    return max(16, min(128, next_power_of_2(ceil_div(2 * num_pairs, num_experts))))


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer, [E, out, in]."""

    gate_up: torch.Tensor  # [E, 2I, H], gates before ups
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2I]
    down_bias: torch.Tensor | None = None  # [E, H]


class ExpertFactors(NamedTuple):
    """Factors of the products of blocks of rows with their experts' weights."""

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
    for first_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = first_k + tl.arange(0, BLOCK_K)
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
        factor_ptrs=ExpertFactors(x, weight, bias, blocks.experts, blocks.pairs),
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
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        weight = tl.load(weights_ptr + pair, mask=mask_r, other=0.0)
        output = tl.load(expert_ptr + pair[:, None] * size + offs[None, :], mask=mask, other=0.0)
        total += output.to(tl.float32) * weight[:, None]
    store_sums(out_ptrs, total, base_ptr, next_norm_ptr, row, num_rows, size, STRIDE_OUT, STRIDE_BASE, DTYPE)


def _combine(
    base: torch.Tensor | None, outputs: torch.Tensor, routes: Routes, norm: Norm | None, out: torch.Tensor | None
) -> HiddenRows:
    num_rows, top_k = routes.weights.shape
    size = outputs.shape[1]
    out = outputs.new_empty(num_rows, size) if out is None else out
    onto = HiddenRows.to_write(out, norm, 1)
    block = block_of(num_rows, 1, size)
    _combine_kernel[(ceil_div(num_rows, block),)](
        out_ptrs=onto.outputs,
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


def experts_residual(
    base: torch.Tensor | None,
    x: torch.Tensor,
    weights: ExpertWeights,
    routes: Routes,
    blocks: ExpertBlocks,
    activation: Activation,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> HiddenRows:
    """Add Σ weight · down(gate x, up x) over each row's experts to base [R, H]; prepare the next norm.

    x: rows after the layer's norm. base: None is zeros. base and out may be slices of wider tensors. Outputs of a row's
    experts are added in the order of its routes, so that a row's result depends on no other row.
    """
    num_rows, top_k = routes.experts.shape
    num_pairs = num_rows * top_k
    grown = _product(x, weights.gate_up, weights.gate_up_bias, blocks, num_pairs, top_k, activation)
    outputs = _product(grown, weights.down, weights.down_bias, blocks, num_pairs, 1, None)
    return _combine(base, outputs, routes, norm, out)
