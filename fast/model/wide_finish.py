"""Steps after a wide product, for one tile of it: bias, gate, residual sum and next norm, or rotation of heads."""

from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

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


class Operands(NamedTuple):
    """What the steps after a product read of a tile, loaded while it is multiplied; 0 where a step is not taken."""

    base: Any  # [_N, R]
    norm: Any  # [_N, 1]
    cos: Any  # [_N / 2, R], of half a head
    sin: Any
    slots: Any  # [1, R]


@gluon.jit
@no_type_check
def _places(tile, row, num_rows, S: gl.constexpr, R: gl.constexpr):
    """Compute a tile's outputs, [outputs, 1], and rows, [1, R], and which of them exist.

    Outputs are those after the gate, or of half a head.
    """
    OUT: gl.constexpr = _N if S.kind == PLAIN else _N // 2
    BY_OUTPUT: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 8], [0, 1])
    outputs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, BY_OUTPUT))[:, None]
    rows = row + gl.arange(0, R, layout=gl.SliceLayout(0, BY_OUTPUT))[None, :]
    return outputs, rows, outputs < (S.size if S.kind == PLAIN else S.size // 2), rows < num_rows


@gluon.jit
@no_type_check
def operands(finish_ptrs, tile, row, num_rows, is_mine, S: gl.constexpr, R: gl.constexpr):
    """Load the operands of a tile's last steps, if it is finished here."""
    outputs, rows, is_output, is_row = _places(tile, row, num_rows, S, R)
    is_output &= is_mine
    is_row &= is_mine
    mask = is_output & is_row
    base, norm, cos, sin, slots = 0, 0, 0, 0, 0
    if S.kind == PLAIN:
        if finish_ptrs.base is not None:
            base = gl.load(finish_ptrs.base + rows * S.stride_base + outputs, mask=mask, other=0.0)
        if finish_ptrs.next_norm is not None:
            norm = gl.load(finish_ptrs.next_norm + outputs, mask=is_output, other=0.0)
    elif S.kind == HEADED:
        HALF: gl.constexpr = S.head_dim // 2
        heads = finish_ptrs.heads
        slots = gl.load(heads.slots_ptr + rows, mask=is_row, other=-1)
        turns_ptr = heads.turns_ptr + 2 * gl.where(is_row, rows, 0).to(gl.int64) * HALF + outputs % HALF
        cos = gl.load(turns_ptr, mask=mask, other=0.0)
        sin = gl.load(turns_ptr + HALF, mask=mask, other=0.0)
    return Operands(base, norm, cos, sin, slots)


@gluon.jit
@no_type_check
def finish(acc, scale, own, finish_ptrs, tile, row, num_rows, S: gl.constexpr, R: gl.constexpr, DTYPE: gl.constexpr):
    """Take the steps after a product for a tile, [_N, R]: see specsim.fast.model.linear and qkv_projection."""
    N: gl.constexpr = S.size
    D: gl.constexpr = S.head_dim
    OUT: gl.constexpr = _N if S.kind == PLAIN else _N // 2
    outputs, rows, is_output, is_row = _places(tile, row, num_rows, S, R)
    mask = is_output & is_row
    BY_OUTPUT: gl.constexpr = mask.type.layout
    bias_ptr = finish_ptrs.bias
    acc = acc * scale[None, :]
    if S.kind == PLAIN:
        if bias_ptr is not None:
            offs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, acc.type.layout))[:, None]
            acc += gl.load(bias_ptr + offs, mask=offs < N, other=0.0).to(gl.float32)
        out = gl.convert_layout(acc.to(DTYPE), BY_OUTPUT)
        if finish_ptrs.base is not None:
            out = (own.base.to(gl.float32) + out.to(gl.float32)).to(DTYPE)
        gl.store(finish_ptrs.rows + rows * S.stride_out + outputs, out, mask=mask)
        if finish_ptrs.next_norm is not None:
            out = out.to(gl.float32)
            weighted = (out * own.norm.to(gl.float32)).to(DTYPE)
            gl.store(finish_ptrs.weighted + rows * N + outputs, weighted, mask=mask)
            squares = gl.sum(gl.where(mask, out * out, 0.0), axis=0)
            row_R = row + gl.arange(0, R, layout=gl.SliceLayout(0, BY_OUTPUT))
            gl.store(finish_ptrs.squares + row_R * S.tiles + tile, squares, mask=row_R < num_rows)
    else:
        first, second = acc.reshape([OUT // 8, 2, 8, R]).permute((0, 2, 3, 1)).split()
        first = first.reshape([OUT, R])
        second = second.reshape([OUT, R])
        HALF: gl.constexpr = N // 2 if S.kind == GATED else D // 2  # outputs between a pair
        if bias_ptr is not None:
            offs = tile * OUT + gl.arange(0, OUT, layout=gl.SliceLayout(1, first.type.layout))[:, None]
            is_bias = offs < N // 2
            offs += offs // HALF * HALF
            first += gl.load(bias_ptr + offs, mask=is_bias, other=0.0).to(gl.float32)
            second += gl.load(bias_ptr + HALF + offs, mask=is_bias, other=0.0).to(gl.float32)
        if S.kind == GATED:
            out = gl.convert_layout(nearest(gated(first, second, DTYPE), DTYPE), BY_OUTPUT)
            gl.store(finish_ptrs.rows + rows * S.stride_out + outputs, out, mask=mask)
        else:
            heads = finish_ptrs.heads
            first = gl.convert_layout(first.to(DTYPE), BY_OUTPUT).to(gl.float32)
            second = gl.convert_layout(second.to(DTYPE), BY_OUTPUT).to(gl.float32)
            turns = Turns(own.cos.to(gl.float32), own.sin.to(gl.float32), own.slots)
            row = gl.where(is_row, rows, 0).to(gl.int64)
            head = outputs // HALF
            offs = outputs % HALF
            query_ptr = heads.query_ptr
            store_heads(query_ptr, heads.kv_ptrs, turns, row, head, offs, first, second, mask, S.heads, S.kv_heads, D)
