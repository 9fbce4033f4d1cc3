"""Products of few rows: one kernel streams the weight once, with the norm before it and what follows fused to it.

A norm before a product is applied to the product: rows come times the norm's weight, and what else it takes, the sum
of a row's squares, was noted when the row was written. Where rows are many or a type is wide a library multiplies, and
the same steps are kernels of their own.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as library_product

from specsim.fast.model.rows import Norm, Rows, add, gated, silu_mul
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_predecessor,
    kernel,
    let_successor_begin,
    nearest,
    require_contiguous,
    stages_within,
)

MOST_ROWS = 64  # of a block of rows, and of a product that is streamed where a library's may serve
PROGRAMS = 132  # one a multiprocessor of an H100 or H200; a constant, so that choices are the same anywhere


class Tiling(NamedTuple):
    """Tiles of a streamed product, rows × outputs × inner dimension, and how many are on their way at a time."""

    block_m: int
    block_n: int
    block_k: int
    stages: int


@functools.cache
def choose(
    num_rows: int, size: int, inner: int, dtype: torch.dtype, batch_invariant: bool, is_gated: bool = False
) -> Tiling | None:
    """How a product of so many rows with a weight [size, inner] is streamed; None where a library's is as quick.

    is_gated: two outputs are made one. batch_invariant: the tiling is that of 64 rows and no library serves, so that a
    row's result does not depend on how many there are. The numbers are those that were quickest on an H200.
    """
    streams = not INTERPRETED and dtype == torch.bfloat16 and num_rows <= MOST_ROWS and size * inner >= 2**20
    is_narrow, few = num_rows <= 16 and not batch_invariant, size <= PROGRAMS * 32
    if not batch_invariant and not (streams and (is_narrow or is_gated or size < 2**14)):
        return None
    if is_gated:
        tiles = (32, 256, 3) if is_narrow else (64, 64, 4)
    elif is_narrow:
        tiles = (32, 512, 4) if few else (32, 256, 4)
    else:
        tiles = (32, 256, 4) if few else (32, 128, 4)
    block_n, block_k, stages = tiles
    return Tiling(16 if is_narrow else MOST_ROWS, block_n, block_k * 2 // dtype.itemsize, stages)


@triton.jit
def streamed(
    x_ptr, w_ptr, offs_m, mask_m, offs_n, mask_n, STRIDE_X: tl.constexpr, K: tl.constexpr, PAIR: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """x Wᵀ at rows offs_m and outputs offs_n, f32 [BLOCK_M, BLOCK_N], and, with PAIR, at outputs offs_n + PAIR too."""
    first, second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_ptrs, x_ptrs = w_ptr + offs_n.to(tl.int64)[:, None] * K, x_ptr + offs_m[:, None] * STRIDE_X
    for place in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = place + tl.arange(0, BLOCK_K)
        inside = (offs_k < K)[None, :]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & (EVEN | inside), other=0.0)
        mask_w = EVEN | (mask_n[:, None] & inside)
        w = tl.load(w_ptrs + offs_k[None, :], mask=mask_w, other=0.0, eviction_policy="evict_first")
        first = tl.dot(x.to(DOT), w.to(DOT).T, first, input_precision="ieee")
        if PAIR > 0:
            w = tl.load(w_ptrs + PAIR * K + offs_k[None, :], mask=mask_w, other=0.0, eviction_policy="evict_first")
            second = tl.dot(x.to(DOT), w.to(DOT).T, second, input_precision="ieee")
    return first, second


@triton.jit
def squares_of(squares_ptr, offs_m, mask_m, PARTS: tl.constexpr):
    """The noted parts of rows' sums of squares, f32 [BLOCK_M, parts]: asked for early, since `scale_of` comes late."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    mask = mask_m[:, None] & (part < PARTS)[None, :]
    return tl.load(squares_ptr + offs_m[:, None] * PARTS + part[None, :], mask=mask, other=0.0)


@triton.jit
def scale_of(squares, eps, K: tl.constexpr):
    """What a norm multiplies rows by, [BLOCK_M, 1]."""
    return tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / K + eps)


@kernel
def _product_kernel(
    out_ptr, weighted_ptr, squares_out_ptr, base_ptr, x_ptr, squares_ptr, w_ptr, bias_ptr, next_norm_ptr, num_rows, eps,
    STRIDE_OUT: tl.constexpr, STRIDE_BASE: tl.constexpr, STRIDE_X: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the product, gated, or added to base rows and noted for the norm that follows."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < num_rows, offs_n < N
    await_predecessor(PDL)
    if PARTS > 0:
        squares = squares_of(squares_ptr, offs_m, mask_m, PARTS)
    first, second = streamed(
        x_ptr, w_ptr, offs_m, mask_m, offs_n, mask_n, STRIDE_X, K, N if GATED else 0, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        STAGES, DOT,
    )  # fmt: skip
    let_successor_begin(PDL)
    if PARTS > 0:
        scale = scale_of(squares, eps, K)
        first, second = first * scale, second * scale
    if bias_ptr is not None:
        first += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(bias_ptr + N + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        first = gated(first, second, DTYPE)
    mask = mask_m[:, None] & mask_n[None, :]
    if base_ptr is not None:
        base = tl.load(base_ptr + offs_m[:, None] * STRIDE_BASE + offs_n[None, :], mask=mask, other=0.0)
        first = nearest(base.to(tl.float32) + nearest(first, DTYPE).to(tl.float32), DTYPE).to(tl.float32)
    tl.store(out_ptr + offs_m[:, None] * STRIDE_OUT + offs_n[None, :], nearest(first, DTYPE), mask=mask)
    if next_norm_ptr is not None:
        weight = tl.load(next_norm_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        weighted = nearest(first * weight[None, :], DTYPE)
        tl.store(weighted_ptr + offs_m[:, None] * N + offs_n[None, :], weighted, mask=mask)
        squares_out_ptr += offs_m * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares_out_ptr, tl.sum(tl.where(mask, first * first, 0.0), axis=1), mask=mask_m)


def tile_arguments(tiling: Tiling, rows: Rows, size: int, inner: int, num_tiles: int = 1) -> dict:
    """The constexpr arguments and options that kernels of streamed products share; num_tiles: of weights at a time."""
    stage_bytes = (tiling.block_m + num_tiles * tiling.block_n) * tiling.block_k * rows.values.itemsize
    return dict(
        STRIDE_X=factor(rows).stride(0),
        K=inner,
        PARTS=0 if rows.norm is None else rows.squares.shape[1],
        EVEN=size % tiling.block_n == 0 and inner % tiling.block_k == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=stages_within(tiling.stages, stage_bytes),
        DOT=_dot_type(rows.values.dtype),
        # Warps share out eight outputs each of a narrow block; more of them would read the same weights again.
        num_warps=min(4, tiling.block_n // 8) if tiling.block_m == 16 else 4,
    )


def factor(rows: Rows) -> torch.Tensor:
    """What a weight is multiplied by: rows without the scale of their norm."""
    return rows.values if rows.norm is None else rows.weighted


def eps_of(rows: Rows) -> float:
    """That of the norm of rows, 0 where they have none."""
    return 0.0 if rows.norm is None else rows.norm.eps


def streaming(
    rows: Rows, weight: torch.Tensor, batch_invariant: bool, is_gated: bool = False
) -> tuple[Tiling | None, Rows]:
    """How rows are multiplied by a weight, None by a library, and the rows without a norm that it cannot apply."""
    num_rows, size, inner = len(rows.values), *weight.shape
    tiling = choose(num_rows, size, inner, weight.dtype, batch_invariant, is_gated) if num_rows else None
    is_ready = rows.norm is None or rows.weighted is not None
    return tiling, rows if tiling and is_ready else Rows(rows.applied())


def _stream(tiling: Tiling, rows: Rows, weight, bias, onto: Rows, base=None, is_gated=False) -> None:
    x, out, (num_rows, size) = factor(rows), onto.values, onto.values.shape
    next_norm = None if onto.weighted is None else onto.norm.weight
    require_contiguous(weight=weight, bias=bias, norm=next_norm)
    if any(each is not None and each.stride(-1) != 1 for each in (x, out, base)):
        raise ValueError(f"rows have strides {x.stride()} and {out.stride()}; allowed: 1 along the last dimension")
    _product_kernel[triton.cdiv(size, tiling.block_n), triton.cdiv(num_rows, tiling.block_m)](
        out, onto.weighted, onto.squares, base, x, rows.squares, weight, bias, next_norm, num_rows, eps_of(rows),
        STRIDE_OUT=out.stride(0), STRIDE_BASE=0 if base is None else base.stride(0), N=size, GATED=is_gated,
        **tile_arguments(tiling, rows, size, weight.shape[1], 2 if is_gated else 1),
    )  # fmt: skip


def linear(
    rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """x Wᵀ (+ bias) of rows [R, K] and a weight [N, K]: [R, N]."""
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return library_product(rows.values, weight, bias)
    out = rows.values.new_empty(len(rows.values), len(weight))
    _stream(tiling, rows, weight, bias, Rows(out))
    return out


def linear_onto(
    base: torch.Tensor,
    rows: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> Rows:
    """base + x Wᵀ (+ bias), [R, N], under the norm that follows; base and out may be columns of wider tensors."""
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return Rows(add(base, library_product(rows.values, weight, bias), out), norm)
    num_rows, size = len(rows.values), len(weight)
    out = rows.values.new_empty(num_rows, size) if out is None else out
    onto = Rows.to_write(out, norm, triton.cdiv(size, tiling.block_n))
    _stream(tiling, rows, weight, bias, onto, base)
    return onto


def linear_gated(
    rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """silu(gate) · up of rows [R, K], [R, I], where the weight [2I, K] (and bias) stacks those of gate and up."""
    tiling, rows = streaming(rows, weight, batch_invariant, is_gated=True)
    if tiling is None:
        return silu_mul(library_product(rows.values, weight, bias))
    out = rows.values.new_empty(len(rows.values), len(weight) // 2)
    _stream(tiling, rows, weight, bias, Rows(out), is_gated=True)
    return out


def _dot_type(dtype: torch.dtype) -> tl.dtype:
    """What is multiplied: f32 under the interpreter, which cannot multiply bf16."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED else types.get(dtype, tl.float32)
