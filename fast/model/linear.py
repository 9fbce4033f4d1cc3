"""Products of few rows: one kernel streams the weight once, fused with the steps before and after.

A norm before a product is applied to the product: rows are stored times the norm's weight, together with the sum of
their squares. On Hopper GPUs products of more rows run in specsim.fast.model.many_rows_product. Products of still more
rows or of wide types use a library, and the fused steps are separate kernels. specsim.fast.model.product_plan chooses.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as library_product

from specsim.fast.model.product_plan import ManyRowsPlan, ProductTiling, choose
from specsim.fast.model.rows import HiddenRows, Norm, add, gated, silu_mul
from specsim.fast.runtime.launch import (
    await_predecessor,
    ceil_div,
    dot_type,
    kernel,
    let_successor_begin,
    nearest,
    require_contiguous,
    stages_within,
)


class Factors(NamedTuple):
    """Both factors of a product."""

    x: torch.Tensor  # [R, K], rows without the scale of their norm
    squares: torch.Tensor | None  # f32 [R, parts], which add up to the sum of a row's squares; None without a norm
    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N]


@triton.jit
@no_type_check
def streamed(
    factor_ptrs,
    offs_m,
    mask_m,
    offs_n,
    mask_n,
    STRIDE_X: tl.constexpr,
    K: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute x Wᵀ, f32 [BLOCK_M, BLOCK_N], at rows offs_m and outputs offs_n.

    With PAIR it also computes the outputs offs_n + PAIR.
    """
    BLOCK_M: tl.constexpr = offs_m.shape[0]
    BLOCK_N: tl.constexpr = offs_n.shape[0]
    first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_ptrs = factor_ptrs.weight + offs_n.to(tl.int64)[:, None] * K
    x_ptrs = factor_ptrs.x + offs_m[:, None] * STRIDE_X
    for first_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = first_k + tl.arange(0, BLOCK_K)
        inside = (offs_k < K)[None, :]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & (EVEN | inside), other=0.0)  # [BLOCK_M, BLOCK_K]
        mask_w = EVEN | (mask_n[:, None] & inside)
        w = tl.load(w_ptrs + offs_k[None, :], mask=mask_w, other=0.0, eviction_policy="evict_first")
        first = tl.dot(x.to(DOT), w.to(DOT).T, first, input_precision="ieee")
        if PAIR > 0:
            w = tl.load(w_ptrs + PAIR * K + offs_k[None, :], mask=mask_w, other=0.0, eviction_policy="evict_first")
            second = tl.dot(x.to(DOT), w.to(DOT).T, second, input_precision="ieee")
    return first, second


@triton.jit
@no_type_check
def squares_of(squares_ptr, offs_m, mask_m, PARTS: tl.constexpr):
    """Load the parts of rows' sums of squares, f32 [BLOCK_M, parts], early for the late use in `scale_of`."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    mask = mask_m[:, None] & (part < PARTS)[None, :]
    return tl.load(squares_ptr + offs_m[:, None] * PARTS + part[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def scale_of(squares, eps, K: tl.constexpr):
    """Compute the scale by which a norm multiplies rows, [BLOCK_M, 1]."""
    return tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / K + eps)


@kernel
@no_type_check
def _product_kernel(
    out_ptrs,
    factor_ptrs,
    base_ptr,
    next_norm_ptr,
    num_rows,
    eps,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    STRIDE_X: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of the product, apply the gate, or add it to base rows and prepare the next norm."""
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < num_rows
    mask_n = offs_n < N
    await_predecessor(PDL)
    if PARTS > 0:
        squares = squares_of(factor_ptrs.squares, offs_m, mask_m, PARTS)
    pair = N if GATED else 0
    first, second = streamed(
        factor_ptrs, offs_m, mask_m, offs_n, mask_n, STRIDE_X, K, pair, EVEN, BLOCK_K, STAGES, DOT
    )  # [BLOCK_M, BLOCK_N]
    let_successor_begin(PDL)
    if PARTS > 0:
        scale = scale_of(squares, eps, K)
        first = first * scale
        second = second * scale
    if factor_ptrs.bias is not None:
        first += tl.load(factor_ptrs.bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(factor_ptrs.bias + N + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        first = gated(first, second, DTYPE)
    mask = mask_m[:, None] & mask_n[None, :]
    if base_ptr is not None:
        base = tl.load(base_ptr + offs_m[:, None] * STRIDE_BASE + offs_n[None, :], mask=mask, other=0.0)
        first = nearest(base.to(tl.float32) + nearest(first, DTYPE).to(tl.float32), DTYPE).to(tl.float32)
    out = out_ptrs.rows + offs_m[:, None] * STRIDE_OUT + offs_n[None, :]
    tl.store(out, nearest(first, DTYPE), mask=mask)
    if next_norm_ptr is not None:
        weight = tl.load(next_norm_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        weighted = nearest(first * weight[None, :], DTYPE)
        tl.store(out_ptrs.weighted + offs_m[:, None] * N + offs_n[None, :], weighted, mask=mask)
        squares = tl.sum(tl.where(mask, first * first, 0.0), axis=1)  # [BLOCK_M]
        tl.store(out_ptrs.squares + offs_m * tl.num_programs(0) + tl.program_id(0), squares, mask=mask_m)


def tile_arguments(
    tiling: ProductTiling, rows: HiddenRows, size: int, inner: int, num_tiles: int = 1
) -> dict[str, Any]:
    """Make the constexpr arguments and options that kernels of streamed products share.

    num_tiles: weight tiles in a stage.
    """
    stage_bytes = (tiling.block_m + num_tiles * tiling.block_n) * tiling.block_k * rows.values.itemsize
    return dict(
        STRIDE_X=rows.factor.stride(0),
        K=inner,
        PARTS=0 if rows.squares is None else rows.squares.shape[1],
        EVEN=size % tiling.block_n == 0 and inner % tiling.block_k == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=stages_within(tiling.stages, stage_bytes),
        DOT=dot_type(rows.values.dtype),
        # A block of few rows has one warp for each eight outputs; more warps would read the same weights again.
        num_warps=min(4, tiling.block_n // 8) if tiling.block_m == 16 else 4,
    )


def streaming(
    rows: HiddenRows, weight: torch.Tensor, batch_invariant: bool, is_gated: bool = False
) -> tuple[ProductTiling | ManyRowsPlan | None, HiddenRows]:
    """Choose the tiles of a product, None for a library, and apply a norm that the product cannot."""
    size, inner = weight.shape
    num_rows = len(rows.values)
    tiling = choose(num_rows, size, inner, weight.dtype, batch_invariant, is_gated) if num_rows else None
    is_ready = rows.norm is None or rows.weighted is not None
    return tiling, rows if tiling and is_ready else HiddenRows(rows.normed())


def _stream(
    tiling: ProductTiling | ManyRowsPlan,
    rows: HiddenRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    onto: HiddenRows,
    base: torch.Tensor | None = None,
    is_gated: bool = False,
) -> None:
    factors = Factors(rows.factor, rows.squares, weight, bias)
    out = onto.values
    num_rows, size = out.shape
    require_contiguous(weight=weight, bias=bias, norm=onto.next_weight)
    if any(rows_RX is not None and rows_RX.stride(-1) != 1 for rows_RX in (factors.x, out, base)):
        strides = f"{factors.x.stride()} and {out.stride()}"
        raise ValueError(f"rows have strides {strides}; allowed: 1 along the last dimension")
    if isinstance(tiling, ManyRowsPlan):
        from specsim.fast.model.many_rows_product import ProductEpilogue, multiply_many_rows

        finish = ProductEpilogue(out, onto.weighted, onto.squares, base, bias, onto.next_weight)
        multiply_many_rows(tiling, factors.x, rows.squares, rows.eps, weight, finish, is_gated)
        return
    _product_kernel[ceil_div(size, tiling.block_n), ceil_div(num_rows, tiling.block_m)](
        out_ptrs=onto.outputs,
        factor_ptrs=factors,
        base_ptr=base,
        next_norm_ptr=onto.next_weight,
        num_rows=num_rows,
        eps=rows.eps,
        STRIDE_OUT=out.stride(0),
        STRIDE_BASE=0 if base is None else base.stride(0),
        N=size,
        GATED=is_gated,
        **tile_arguments(tiling, rows, size, weight.shape[1], 2 if is_gated else 1),
    )


def linear(
    rows: HiddenRows, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """Compute x Wᵀ (+ bias), [R, N], of rows [R, K] and a weight [N, K]."""
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return library_product(rows.values, weight, bias)
    out = rows.values.new_empty(len(rows.values), len(weight))
    _stream(tiling, rows, weight, bias, HiddenRows(out))
    return out


def linear_residual(
    base: torch.Tensor,
    rows: HiddenRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> HiddenRows:
    """Compute base + x Wᵀ (+ bias), [R, N], and prepare the next norm.

    base and out may be slices of wider tensors.
    """
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return HiddenRows(add(base, library_product(rows.values, weight, bias), out), norm)
    num_rows = len(rows.values)
    size = len(weight)
    out = rows.values.new_empty(num_rows, size) if out is None else out
    onto = HiddenRows.to_write(out, norm, ceil_div(size, tiling.block_n))
    _stream(tiling, rows, weight, bias, onto, base)
    return onto


def linear_gated(
    rows: HiddenRows, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """Compute silu(gate) · up, [R, I], of rows [R, K].

    The weight [2I, K] and bias stack gate and up.
    """
    tiling, rows = streaming(rows, weight, batch_invariant, is_gated=True)
    if tiling is None:
        return silu_mul(library_product(rows.values, weight, bias))
    out = rows.values.new_empty(len(rows.values), len(weight) // 2)
    _stream(tiling, rows, weight, bias, HiddenRows(out), is_gated=True)
    return out
