"""Product with the fused projection of queries, keys and values, which also rotates and writes them."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.model.linear import Factors, scale_of, squares_of, streamed, tile_arguments
from specsim.fast.model.product_plan import ManyRowsPlan, ProductTiling
from specsim.fast.model.rotary import ForwardContext, load_cos_sin, store_heads
from specsim.fast.model.rows import HiddenRows
from specsim.fast.runtime.launch import (
    await_predecessor,
    ceil_div,
    kernel,
    let_successor_begin,
    nearest,
    require_contiguous,
)


@kernel
@no_type_check
def _qkv_kernel(
    query_ptr,
    kv_ptrs,
    factor_ptrs,
    cos_sin_ptr,
    slots_ptr,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    STRIDE_X: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some dimensions of both halves of one head, for a block of rows."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    head = tl.program_id(0) // (HALF // BLOCK_N)
    offs = tl.program_id(0) % (HALF // BLOCK_N) * BLOCK_N
    offs += tl.arange(0, BLOCK_N)
    mask_m = row < num_rows
    output = head * D + offs
    is_place = offs < HALF
    mask = mask_m[:, None] & is_place[None, :]
    await_predecessor(PDL)
    if PARTS > 0:
        squares = squares_of(factor_ptrs.squares, row, mask_m, PARTS)
    rotation = load_cos_sin(cos_sin_ptr, slots_ptr, row[:, None], offs[None, :], mask, HALF)
    first, second = streamed(
        factor_ptrs, row, mask_m, output, is_place, STRIDE_X, K, HALF, EVEN, BLOCK_K, STAGES, DOT
    )  # [BLOCK_M, BLOCK_N]
    let_successor_begin(PDL)
    if PARTS > 0:
        scale = scale_of(squares, eps, K)
        first = first * scale
        second = second * scale
    if factor_ptrs.bias is not None:
        first += tl.load(factor_ptrs.bias + output).to(tl.float32)[None, :]
        second += tl.load(factor_ptrs.bias + output + HALF).to(tl.float32)[None, :]
    first = nearest(first, DTYPE).to(tl.float32)
    second = nearest(second, DTYPE).to(tl.float32)
    store_heads(
        query_ptr, kv_ptrs, rotation, row[:, None], head, offs[None, :], first, second, mask, HEADS, KV_HEADS, D
    )


def project_rotate_and_write(
    tiling: ProductTiling | ManyRowsPlan,
    rows: HiddenRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    forward: ForwardContext,
    layer: int,
    num_heads: int,
) -> torch.Tensor:
    """Project, rotate and write: rotate_and_write without head norms, fused with the product."""
    require_contiguous(weight=weight, bias=bias)
    factors = Factors(rows.factor, rows.squares, weight, bias)
    kv = forward.layer_kv(layer)
    num_rows = len(factors.x)
    kv_heads, head_dim = kv.keys_ptr.shape[1:]
    query_RAD = factors.x.new_empty(num_rows, num_heads, head_dim)
    if isinstance(tiling, ManyRowsPlan):
        from specsim.fast.model.many_rows_product import HeadOutputs, ProductEpilogue, multiply_many_rows

        heads = HeadOutputs(query_RAD, kv, forward.cos_sin, forward.metadata.slots)
        multiply_many_rows(tiling, factors.x, rows.squares, rows.eps, weight, ProductEpilogue(bias=bias, heads=heads))
        return query_RAD
    tiling = tiling._replace(block_n=tiling.block_n // 2)  # outputs of each half
    _qkv_kernel[len(weight) // 2 // tiling.block_n, ceil_div(num_rows, tiling.block_m)](
        query_ptr=query_RAD,
        kv_ptrs=kv,
        factor_ptrs=factors,
        cos_sin_ptr=forward.cos_sin,
        slots_ptr=forward.metadata.slots,
        num_rows=num_rows,
        eps=rows.eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        **tile_arguments(tiling, rows, len(weight) // 2, weight.shape[1], 2),
    )
    return query_RAD
