"""Products of few rows: one kernel streams the weight once, with the norm before it and what follows fused to it.

A norm that is pending is applied to the rows as they are read: what it needs of a row, the sum of its squares, was
noted when the row was written. Where rows are many or a type is wide a library multiplies, and the same steps are
kernels of their own.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as library_product

from specsim.fast.launch import INTERPRETED, await_predecessor, kernel, let_successor_begin, nearest
from specsim.fast.rows import Rows, add, gated, normalised, silu_mul

MOST_ROWS = 64  # of a block of rows, and of a product that is streamed where a library's may serve


class Tiling(NamedTuple):
    """Tiles of a streamed product: rows × outputs × inner dimension."""

    block_m: int
    block_n: int
    block_k: int
    stages: int


@functools.cache
def choose(num_rows: int, size: int, inner: int, itemsize: int, batch_invariant: bool) -> Tiling | None:
    """How a product of so many rows with a weight [size, inner] is streamed; None where a library's is as quick.

    batch_invariant: the tiling is that of 64 rows and no library serves, so that a row's result does not depend on how
    many there are. A function of the shape alone; the numbers are those that were quickest on an H200.
    """
    if batch_invariant:
        return _tiling(MOST_ROWS, size, itemsize)
    if INTERPRETED or itemsize != 2 or num_rows > MOST_ROWS or size * inner < 2**20:
        return None
    return _tiling(max(16, triton.next_power_of_2(num_rows)), size, itemsize)


def _tiling(block_m: int, size: int, itemsize: int) -> Tiling:
    block_n, block_k = 32, (256 if block_m <= 16 else 128) * 2 // itemsize
    stage = (block_m + block_n) * block_k * itemsize
    # Of shared memory, for the tiles under way: half a multiprocessor's where a second program runs beside the first.
    staged = 150_000 if size <= 132 * block_n else 110_000
    return Tiling(block_m, block_n, block_k, max(2, min(6, staged // stage)))


@triton.jit
def streamed(
    x_ptr, squares_ptr, norm_ptr, eps, w_ptr, offs_m, mask_m, offs_n, mask_n, STRIDE_X: tl.constexpr, K: tl.constexpr,
    PAIR: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x Wᵀ at rows offs_m and outputs offs_n, f32 [BLOCK_M, BLOCK_N], and, with PAIR, at outputs offs_n + PAIR too.

    PARTS: into how many the sum of squares of a row is cut, whose norm is pending then; 0 where it is not. The first
    tile of the weight is on its way before the rows to multiply are waited for.
    """
    first, second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_ptrs, x_ptrs = w_ptr + offs_n.to(tl.int64)[:, None] * K, x_ptr + offs_m[:, None] * STRIDE_X
    scale, offs_k = tl.full([BLOCK_M], 1.0, tl.float32), tl.arange(0, BLOCK_K)
    mask_first = mask_n[:, None] & (offs_k < K)[None, :]
    w = tl.load(w_ptrs + offs_k[None, :], mask=mask_first, other=0.0)
    if PAIR > 0:
        paired = tl.load(w_ptrs + PAIR * K + offs_k[None, :], mask=mask_first, other=0.0)
    await_predecessor(PDL)
    if PARTS > 0:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        squares_ptrs = squares_ptr + offs_m[:, None] * PARTS + part[None, :]
        squares = tl.load(squares_ptrs, mask=mask_m[:, None] & (part < PARTS)[None, :], other=0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & (offs_k < K)[None, :], other=0.0)
    if PARTS > 0:
        weight = tl.load(norm_ptr + offs_k, mask=offs_k < K, other=0.0)[None, :]
        x = normalised(x, scale[:, None], weight, x_ptr.dtype.element_ty)
    first = tl.dot(x.to(DOT), w.to(DOT).T, first, input_precision="ieee")
    if PAIR > 0:
        second = tl.dot(x.to(DOT), paired.to(DOT).T, second, input_precision="ieee")
    for place in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        inner = place + tl.arange(0, BLOCK_K)
        inside = inner < K
        mask_w = mask_n[:, None] & inside[None, :]
        x = tl.load(x_ptrs + inner[None, :], mask=mask_m[:, None] & (EVEN | inside)[None, :], other=0.0)
        if PARTS > 0:
            weight = tl.load(norm_ptr + inner, mask=EVEN | inside, other=0.0)[None, :]
            x = normalised(x, scale[:, None], weight, x_ptr.dtype.element_ty)
        w = tl.load(w_ptrs + inner[None, :], mask=EVEN | mask_w, other=0.0, eviction_policy="evict_first")
        first = tl.dot(x.to(DOT), w.to(DOT).T, first, input_precision="ieee")
        if PAIR > 0:
            w_places = w_ptrs + PAIR * K + inner[None, :]
            paired = tl.load(w_places, mask=EVEN | mask_w, other=0.0, eviction_policy="evict_first")
            second = tl.dot(x.to(DOT), paired.to(DOT).T, second, input_precision="ieee")
    let_successor_begin(PDL)
    return first, second


@kernel
def _product_kernel(
    out_ptr, squares_out_ptr, base_ptr, x_ptr, squares_ptr, norm_ptr, w_ptr, bias_ptr, num_rows, eps,
    STRIDE_OUT: tl.constexpr, STRIDE_BASE: tl.constexpr, STRIDE_X: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the product, gated, or added to base rows whose squares are noted, a part for every tile."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < num_rows, offs_n < N
    first, second = streamed(
        x_ptr, squares_ptr, norm_ptr, eps, w_ptr, offs_m, mask_m, offs_n, mask_n, STRIDE_X, K, N if GATED else 0, PARTS,
        EVEN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT, PDL,
    )  # fmt: skip
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
        tile, tiles = tl.program_id(0), tl.num_programs(0)
        tl.store(squares_out_ptr + offs_m * tiles + tile, tl.sum(first * first, axis=1), mask=mask_m)
    tl.store(out_ptr + offs_m[:, None] * STRIDE_OUT + offs_n[None, :], nearest(first, DTYPE), mask=mask)


def tile_arguments(tiling: Tiling, rows: Rows, size: int, inner: int) -> dict:
    """The constexpr arguments that kernels of streamed products share."""
    return dict(
        STRIDE_X=rows.values.stride(0),
        K=inner,
        PARTS=0 if rows.weight is None else rows.squares.shape[1],
        EVEN=size % tiling.block_n == 0 and inner % tiling.block_k == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.stages,
        DOT=_dot_type(rows.values.dtype),
    )


def streaming(rows: Rows, weight: torch.Tensor, batch_invariant: bool) -> tuple[Tiling | None, Rows]:
    """How rows are multiplied by a weight, None by a library, and the rows with no norm that it cannot apply."""
    num_rows, is_ready = len(rows.values), rows.weight is None or rows.squares is not None
    tiling = choose(num_rows, *weight.shape, rows.values.itemsize, batch_invariant) if num_rows else None
    return tiling, rows if tiling and is_ready else Rows(rows.applied())


def _stream(tiling: Tiling, rows: Rows, weight, bias, out, base=None, squares_out=None, is_gated=False) -> None:
    x, (num_rows, size) = rows.values, out.shape
    if any(each is not None and each.stride(-1) != 1 for each in (x, out, base)):
        raise ValueError(f"rows have strides {x.stride()} and {out.stride()}; allowed: 1 along the last dimension")
    _product_kernel[triton.cdiv(size, tiling.block_n), triton.cdiv(num_rows, tiling.block_m)](
        out, squares_out, base, x, rows.squares, rows.weight, weight, bias, num_rows, rows.eps,
        STRIDE_OUT=out.stride(0), STRIDE_BASE=0 if base is None else base.stride(0), N=size, GATED=is_gated,
        **tile_arguments(tiling, rows, size, weight.shape[1]),
    )  # fmt: skip


def linear(
    rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """x Wᵀ (+ bias) of rows [R, K] and a weight [N, K]: [R, N]."""
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return library_product(rows.values, weight, bias)
    out = rows.values.new_empty(len(rows.values), len(weight))
    _stream(tiling, rows, weight, bias, out)
    return out


def linear_onto(
    base: Rows,
    rows: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> Rows:
    """base + x Wᵀ (+ bias), [R, N]; base and out may be columns of wider tensors."""
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return Rows(add(base.values, library_product(rows.values, weight, bias), out))
    out = rows.values.new_empty(len(rows.values), len(weight)) if out is None else out
    squares = out.new_empty(len(out), triton.cdiv(len(weight), tiling.block_n), dtype=torch.float32)
    _stream(tiling, rows, weight, bias, out, base.values, squares)
    return Rows(out, squares)


def linear_gated(
    rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """silu(gate) · up of rows [R, K], [R, I], where the weight [2I, K] (and bias) stacks those of gate and up."""
    tiling, rows = streaming(rows, weight, batch_invariant)
    if tiling is None:
        return silu_mul(library_product(rows.values, weight, bias))
    out = rows.values.new_empty(len(rows.values), len(weight) // 2)
    tiling = tiling._replace(stages=min(3, tiling.stages))  # of tiles of two weights
    _stream(tiling, rows, weight, bias, out, is_gated=True)
    return out


def _dot_type(dtype: torch.dtype) -> tl.dtype:
    """What is multiplied: f32 under the interpreter, which cannot multiply bf16."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED else types.get(dtype, tl.float32)
