"""Experts of a single row, which all differ, so that every pair is a block of its own: two kernels."""

from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.target import Experts
from specsim.fast.model.experts import ExpertWeights, clamped
from specsim.fast.model.routing import Routes, choice_arguments, ranked
from specsim.fast.model.rows import HiddenRows, Norm, gated
from specsim.fast.runtime.launch import (
    await_predecessor,
    ceil_div,
    kernel,
    let_successor_begin,
    nearest,
    next_power_of_2,
    require_contiguous,
)


class Tile(NamedTuple):
    """Tile of a product of one row."""

    outputs: int
    inputs: int
    stages: int
    warps: int


# The fastest on an H200 for Qwen3-30B-A3B and GPT-OSS-20B.
UP = Tile(8, 256, 4, 4)
DOWN = Tile(8, 128, 4, 4)


class _Routed(NamedTuple):
    experts: torch.Tensor  # i16 [1, k], written
    weights: torch.Tensor  # f32 [1, k], written
    logits: torch.Tensor  # f32 [1, E]
    bias: torch.Tensor | None  # of the choice, [E]


class RoutedRowFactors(NamedTuple):
    """Factors of the products of one row with its experts' weights."""

    x: torch.Tensor  # [1, K], or [k, K] with a row for each expert
    weight: torch.Tensor  # [E, N or 2N, K]
    bias: torch.Tensor | None  # [E, N or 2N]


@kernel
@no_type_check
def _up_kernel(
    out_ptr,
    routed_ptrs,
    factor_ptrs,
    scaling,
    N: tl.constexpr,
    K: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    E: tl.constexpr,
    ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the expert of one rank, and compute some of its gated outputs."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    chosen_rank = tl.program_id(1)
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    await_predecessor(PDL)
    logits = tl.load(routed_ptrs.logits + offs_e, mask=offs_e < E, other=0.0)
    rank, weight = ranked(logits, routed_ptrs.bias, offs_e, E, ROUTING, TOP_K, NORMALISE, GROUPS, TOP_GROUPS, BLOCK_G)
    expert = tl.sum(tl.where(rank == chosen_rank, offs_e, 0)).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(routed_ptrs.experts + chosen_rank, expert.to(tl.int16))
        tl.store(routed_ptrs.weights + chosen_rank, tl.sum(tl.where(rank == chosen_rank, weight, 0.0)) * scaling)
    weight_ptrs = factor_ptrs.weight + expert * 2 * N * K + offs_n.to(tl.int64)[:, None] * K
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = first_k + tl.arange(0, BLOCK_K)
        mask = mask_n[:, None] & (offs_k < K)[None, :]
        x = tl.load(factor_ptrs.x + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(weight_ptrs + offs_k[None, :], mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(weight_ptrs + N * K + offs_k[None, :], mask=mask, other=0.0).to(tl.float32) * x
    let_successor_begin(PDL)
    first = tl.sum(gate, axis=1)
    second = tl.sum(up, axis=1)
    if factor_ptrs.bias is not None:
        bias_ptr = factor_ptrs.bias + expert * 2 * N + offs_n
        first += tl.load(bias_ptr, mask=mask_n, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + N, mask=mask_n, other=0.0).to(tl.float32)
    first = clamped(first, second, DTYPE) if CLAMPED else gated(first, second, DTYPE)
    tl.store(out_ptr + chosen_rank * N + offs_n, nearest(first, DTYPE), mask=mask_n)


@kernel
@no_type_check
def _down_kernel(
    out_ptrs,
    factor_ptrs,
    routed_ptrs,
    base_ptr,
    next_norm_ptr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add some outputs of all experts to the row, and prepare the next norm."""
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    rank = tl.arange(0, BLOCK_P)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    await_predecessor(PDL)
    expert = tl.load(routed_ptrs.experts + rank, mask=rank < TOP_K, other=0).to(tl.int64)
    weight_ptrs = factor_ptrs.weight + (expert[:, None] * N + offs_n[None, :])[:, :, None] * K
    mask_pn = (rank < TOP_K)[:, None] & mask_n[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_N, BLOCK_K], tl.float32)
    for first_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = first_k + tl.arange(0, BLOCK_K)
        mask_x = (rank < TOP_K)[:, None] & (offs_k < K)[None, :]
        x = tl.load(factor_ptrs.x + rank[:, None] * K + offs_k[None, :], mask=mask_x, other=0.0).to(tl.float32)
        mask = mask_pn[:, :, None] & (offs_k < K)[None, None, :]
        w = tl.load(weight_ptrs + offs_k[None, None, :], mask=mask, other=0.0)
        total += w.to(tl.float32) * x[:, None, :]
    let_successor_begin(PDL)
    outputs = tl.sum(total, axis=2)  # [BLOCK_P, BLOCK_N]
    if factor_ptrs.bias is not None:
        bias_ptrs = factor_ptrs.bias + expert[:, None] * N + offs_n[None, :]
        outputs += tl.load(bias_ptrs, mask=mask_pn, other=0.0).to(tl.float32)
    share = tl.load(routed_ptrs.weights + rank, mask=rank < TOP_K, other=0.0)
    added = tl.sum(nearest(outputs, DTYPE).to(tl.float32) * share[:, None], axis=0)
    x = nearest(added, DTYPE)
    if base_ptr is not None:
        base = tl.load(base_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        x = nearest(base + x.to(tl.float32), DTYPE)
    tl.store(out_ptrs.rows + offs_n, x, mask=mask_n)
    if next_norm_ptr is not None:
        x = x.to(tl.float32)
        weight = tl.load(next_norm_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(out_ptrs.weighted + offs_n, nearest(x * weight, DTYPE), mask=mask_n)
        tl.store(out_ptrs.squares + tl.program_id(0), tl.sum(x * x))


def routed_row_residual(
    base: torch.Tensor | None,
    x: torch.Tensor,
    weights: ExpertWeights,
    experts: Experts,
    logits_E: torch.Tensor,
    bias_E: torch.Tensor | None,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> tuple[HiddenRows, torch.Tensor]:
    """Add Σ weight · down(gate x, up x) over one row's experts to base [1, H]; returns them, i16 [1, k].

    base: None is zeros. x: the row after the layer's norm. logits_E, bias_E: as `routing.route` takes them; the choice
    is the same.
    """
    require_contiguous(x=x, logits=logits_E, bias=bias_E, **weights._asdict())
    routes = Routes(
        x.new_empty(1, experts.top_k, dtype=torch.int16), x.new_empty(1, experts.top_k, dtype=torch.float32)
    )
    routed = _Routed(*routes, logits_E, bias_E)
    grown = _grown(x, weights, experts, routed)
    num_outputs = weights.down.shape[1]
    out = x.new_empty(1, num_outputs) if out is None else out
    blocks = ceil_div(num_outputs, DOWN.outputs)
    onto = HiddenRows.to_write(out, norm, blocks)
    _down_kernel[(blocks,)](
        out_ptrs=onto.outputs,
        factor_ptrs=RoutedRowFactors(grown, weights.down, weights.down_bias),
        routed_ptrs=routed,
        base_ptr=base,
        next_norm_ptr=onto.next_weight,
        TOP_K=experts.top_k,
        N=num_outputs,
        K=experts.size,
        BLOCK_P=next_power_of_2(experts.top_k),
        BLOCK_N=DOWN.outputs,
        BLOCK_K=min(DOWN.inputs, max(16, next_power_of_2(experts.size))),
        STAGES=DOWN.stages,
        num_warps=DOWN.warps,
    )
    return onto, routes.experts


def _grown(x: torch.Tensor, weights: ExpertWeights, experts: Experts, routed: _Routed) -> torch.Tensor:
    """Choose the row's experts and compute their gated outputs, [k, I]."""
    out = x.new_empty(experts.top_k, experts.size)
    _up_kernel[ceil_div(experts.size, UP.outputs), experts.top_k](
        out_ptr=out,
        routed_ptrs=routed,
        factor_ptrs=RoutedRowFactors(x, weights.gate_up, weights.gate_up_bias),
        scaling=experts.scaling,
        N=experts.size,
        K=x.shape[1],
        CLAMPED=experts.activation == "clamped",
        BLOCK_N=UP.outputs,
        BLOCK_K=min(UP.inputs, max(16, next_power_of_2(x.shape[1]))),
        STAGES=UP.stages,
        BLOCK_E=max(16, next_power_of_2(experts.num_experts)),
        num_warps=UP.warps,
        **choice_arguments(experts),
    )
    return out
