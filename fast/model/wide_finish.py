"""Steps after a wide product, for one of its tiles.

They are bias, gate, residual sum and next norm, or the rotation of heads.
"""

from dataclasses import dataclass
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specsim.fast.model.rotary import Turns, store_heads
from specsim.fast.model.rows import gated
from specsim.fast.model.wide_plan import BLOCK_N
from specsim.fast.runtime.launch import nearest

PLAIN, GATED, HEADED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a product
_N = gl.constexpr(BLOCK_N)


@dataclass(frozen=True)
class Shape:
    """Numbers of a product, constants of a compilation."""

    size: int
    inner: int
    stride_out: int
    stride_base: int
    share: int  # blocks of a program
    tiles: int
    blocks: int  # of a tile
    most_parts: int  # of a tile
    finishers: int  # programs that finish a tile together
    squares: int  # parts of a row's sum of squares, 0 without a norm
    kind: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    precedes_wide: bool  # the next kernel is a wide product too


@gluon.jit
@no_type_check
def scale_of(squares_ptr, row, num_rows, eps, K: gl.constexpr, PARTS: gl.constexpr, R: gl.constexpr):
    """Compute the scale by which a norm multiplies rows, [R]."""
    BY_WARP: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    row += gl.arange(0, R, layout=gl.SliceLayout(1, BY_WARP))[:, None]
    part = gl.arange(0, 32, layout=gl.SliceLayout(0, BY_WARP))[None, :]
    total = gl.zeros([R, 32], gl.float32, BY_WARP)
    for low in gl.static_range(0, PARTS, 32):
        mask = (row < num_rows) & (low + part < PARTS)
        total += gl.load(squares_ptr + row * PARTS + low + part, mask=mask, other=0.0)
    return gl.rsqrt(gl.sum(total, axis=1) / K + eps)


@gluon.jit
@no_type_check
def finish(acc, scale, finish_ptrs, tile, row, num_rows, S: gl.constexpr, R: gl.constexpr, DTYPE: gl.constexpr):
    """Take the steps after a product for a tile, [_N, R]: see specsim.fast.model.linear and qkv_projection."""
    N: gl.constexpr = S.size
    KIND: gl.constexpr = S.kind
    D: gl.constexpr = S.head_dim
    OUT: gl.constexpr = _N if KIND == PLAIN else _N // 2  # outputs after the gate, or of each half of the heads
    BY_OUTPUT: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 8], [0, 1])
    bias_ptr = finish_ptrs.bias
    acc = acc * scale[None, :]
    row_R = row + gl.arange(0, R, layout=gl.SliceLayout(0, BY_OUTPUT))
    row = row_R[None, :]
    mask_r = row < num_rows
    if KIND == PLAIN:
        if bias_ptr is not None:
            offs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, acc.type.layout))[:, None]
            acc += gl.load(bias_ptr + offs, mask=offs < N, other=0.0).to(gl.float32)
        out = gl.convert_layout(acc.to(DTYPE), BY_OUTPUT)
        offs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, BY_OUTPUT))[:, None]
        mask = (offs < N) & mask_r
        if finish_ptrs.base is not None:
            base = gl.load(finish_ptrs.base + row * S.stride_base + offs, mask=mask, other=0.0)
            out = (base.to(gl.float32) + out.to(gl.float32)).to(DTYPE)
        gl.store(finish_ptrs.rows + row * S.stride_out + offs, out, mask=mask)
        if finish_ptrs.next_norm is not None:
            out = out.to(gl.float32)
            norm = gl.load(finish_ptrs.next_norm + offs, mask=offs < N, other=0.0).to(gl.float32)
            gl.store(finish_ptrs.weighted + row * N + offs, (out * norm).to(DTYPE), mask=mask)
            squares = gl.sum(gl.where(mask, out * out, 0.0), axis=0)
            gl.store(finish_ptrs.squares + row_R * S.tiles + tile, squares, mask=row_R < num_rows)
    else:
        first, second = acc.reshape([OUT // 8, 2, 8, R]).permute((0, 2, 3, 1)).split()
        first = first.reshape([OUT, R])
        second = second.reshape([OUT, R])
        HALF: gl.constexpr = N // 2 if KIND == GATED else D // 2  # outputs between a pair
        if bias_ptr is not None:
            offs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, first.type.layout))[:, None]
            mask = offs < N // 2
            offs += offs // HALF * HALF
            first += gl.load(bias_ptr + offs, mask=mask, other=0.0).to(gl.float32)
            second += gl.load(bias_ptr + HALF + offs, mask=mask, other=0.0).to(gl.float32)
        offs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, BY_OUTPUT))[:, None]
        mask = (offs < N // 2) & mask_r
        if KIND == GATED:
            out = gl.convert_layout(nearest(gated(first, second, DTYPE), DTYPE), BY_OUTPUT)
            gl.store(finish_ptrs.rows + row * S.stride_out + offs, out, mask=mask)
        else:
            heads = finish_ptrs.heads
            first = gl.convert_layout(first.to(DTYPE), BY_OUTPUT).to(gl.float32)
            second = gl.convert_layout(second.to(DTYPE), BY_OUTPUT).to(gl.float32)
            head = offs // HALF
            offs = offs % HALF
            slot_R = gl.load(heads.slots_ptr + row_R, mask=row_R < num_rows, other=-1)
            row = gl.where(mask_r, row, 0).to(gl.int64)
            turns_ptr = heads.turns_ptr + 2 * row * HALF + offs
            cos = gl.load(turns_ptr, mask=mask, other=0.0).to(gl.float32)
            sin = gl.load(turns_ptr + HALF, mask=mask, other=0.0).to(gl.float32)
            turns = Turns(cos, sin, slot_R[None, :])
            query_ptr = heads.query_ptr
            store_heads(query_ptr, heads.kv_ptrs, turns, row, head, offs, first, second, mask, S.heads, S.kv_heads, D)
