"""Routing of rows to experts: logits of few rows with their norm, and scores, choice and weights in one kernel."""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.target import Experts, Routing
from specsim.fast.model.rows import HiddenRows, normalised
from specsim.fast.runtime.launch import (
    await_input,
    await_predecessor,
    block_of,
    ceil_div,
    kernel,
    let_successor_begin,
    next_power_of_2,
    require_contiguous,
)

FEW_ROWS = 16  # every program computes a row's norm again
_ROUTING: dict[Routing, int] = {"softmax": 0, "softmax_of_top": 1, "grouped_sigmoid": 2}


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
    rows: HiddenRows, weight_EH: torch.Tensor, bias_E: torch.Tensor | None
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


class Routes(NamedTuple):
    """Experts of every row, best first, the lower one of equal ones."""

    experts: torch.Tensor  # i16 [R, k]
    weights: torch.Tensor  # f32 [R, k]


@triton.jit
@no_type_check
def _best(choice, offs):
    """Find the largest entry of each row and its first place, [BLOCK_R, 1] each."""
    best = tl.max(choice, axis=1, keep_dims=True)
    index = tl.min(tl.where(choice == best, offs, choice.shape[1] - 1), axis=1, keep_dims=True)
    return best, index


@triton.jit
@no_type_check
def _in_top_groups(choice, offs, size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Check which experts, `size` in a group, are in the groups with the largest sums of two."""
    group = offs // size
    offs_g = tl.arange(0, BLOCK_G)[None, :]
    sums = tl.full([choice.shape[0], BLOCK_G], float("-inf"), tl.float32)
    for group_index in tl.static_range(GROUPS):
        of_group = tl.where(group == group_index, choice, float("-inf"))
        first, index = _best(of_group, offs)
        second, _ = _best(tl.where(offs == index, float("-inf"), of_group), offs)
        sums = tl.where(offs_g == group_index, first + tl.where(second > float("-inf"), second, 0.0), sums)
    in_top = offs < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, index = _best(sums, offs_g)
        in_top = in_top | (group == index)
        sums = tl.where(offs_g == index, float("-inf"), sums)
    return in_top


@triton.jit
@no_type_check
def ranked(
    logits,
    bias_ptr,
    offs,
    E: tl.constexpr,
    ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Compute the rank of every expert in its row, from 0, and the weights of those of rank below TOP_K.

    logits: [BLOCK_R, BLOCK_E] at experts offs [1, BLOCK_E]. Each result has that shape. Every pair of experts is
    compared at once, since choosing one after the other is a chain of waits.
    """
    BLOCK_R: tl.constexpr = logits.shape[0]
    BLOCK_E: tl.constexpr = logits.shape[1]
    logits = tl.where(offs < E, logits, float("-inf"))
    score = logits
    if ROUTING == 0:
        top = tl.max(logits, axis=1, keep_dims=True)
        grown = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top))
        score = grown / tl.sum(grown, axis=1, keep_dims=True)
    if ROUTING == 2:
        score = 1.0 / (1.0 + tl.exp(-logits))
    choice = score
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + offs, mask=offs < E, other=0.0).to(tl.float32)
    choice = tl.where((offs < E) & (choice == choice), choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        in_top = _in_top_groups(choice, offs, E // GROUPS, GROUPS, TOP_GROUPS, BLOCK_G)
        choice = tl.where(in_top, choice, float("-inf"))
    candidate = tl.reshape(choice, [BLOCK_R, BLOCK_E, 1])
    other = tl.reshape(choice, [BLOCK_R, 1, BLOCK_E])
    expert = tl.arange(0, BLOCK_E)
    is_before = (expert[None, :] < expert[:, None])[None, :, :]
    rank = tl.sum(((other > candidate) | ((other == candidate) & is_before)).to(tl.int32), axis=2)  # [BLOCK_R, BLOCK_E]
    is_chosen = (rank < TOP_K) & (offs < E)
    if ROUTING == 1:
        top = tl.max(logits, axis=1, keep_dims=True)
        grown = tl.where(is_chosen, tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)), 0.0)
        score = grown / tl.sum(grown, axis=1, keep_dims=True)
    if NORMALISE:
        score = score / (tl.sum(tl.where(is_chosen, score, 0.0), axis=1, keep_dims=True) + 1e-20)
    return rank, score


@kernel
@no_type_check
def _routing_kernel(
    experts_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    num_rows,
    scaling,
    E: tl.constexpr,
    ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    offs = tl.arange(0, BLOCK_E)[None, :]
    mask = (row < num_rows) & (offs < E)
    logits = tl.load(logits_ptr + row * E + offs, mask=mask, other=0.0).to(tl.float32)
    rank, weight = ranked(logits, bias_ptr, offs, E, ROUTING, TOP_K, NORMALISE, GROUPS, TOP_GROUPS, BLOCK_G)
    mask = mask & (rank < TOP_K)
    tl.store(experts_ptr + row * TOP_K + rank, tl.broadcast_to(offs, rank.shape).to(tl.int16), mask=mask)
    tl.store(weights_ptr + row * TOP_K + rank, weight * scaling, mask=mask)


def choice_arguments(experts: Experts) -> dict[str, int | bool]:
    """Give the arguments of `ranked`, by name."""
    return {
        "E": experts.num_experts,
        "ROUTING": _ROUTING[experts.routing],
        "TOP_K": experts.top_k,
        "NORMALISE": experts.normalise,
        "GROUPS": experts.groups,
        "TOP_GROUPS": experts.top_groups,
        "BLOCK_G": next_power_of_2(experts.groups),
    }


def route(logits_RE: torch.Tensor, experts: Experts, bias_E: torch.Tensor | None = None) -> Routes:
    """Choose the experts of rows with these router logits.

    `softmax` chooses by and weighs with the softmax over all experts, `softmax_of_top` with the softmax over the chosen
    ones; `grouped_sigmoid` chooses by σ(logit) + bias in the row's best groups, and weighs with σ(logit) (DeepSeek-V3).
    A group counts the sum of its two best experts.
    """
    require_contiguous(logits_RE=logits_RE, bias_E=bias_E)
    num_rows, num_experts = logits_RE.shape
    chosen = logits_RE.new_empty(num_rows, experts.top_k, dtype=torch.int16)
    weights = logits_RE.new_empty(num_rows, experts.top_k, dtype=torch.float32)
    block_e = max(16, next_power_of_2(num_experts))
    block = block_of(num_rows, 1, block_e * block_e)
    _routing_kernel[(ceil_div(num_rows, block),)](
        experts_ptr=chosen,
        weights_ptr=weights,
        logits_ptr=logits_RE,
        bias_ptr=bias_E,
        num_rows=num_rows,
        scaling=experts.scaling,
        BLOCK_R=block,
        BLOCK_E=block_e,
        num_warps=4,
        **choice_arguments(experts),
    )
    return Routes(chosen, weights)
