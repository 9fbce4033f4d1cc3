"""Epilogue of a product of many rows: the sum of a tile's parts, and the steps after the product.

Parts of several programs are added in the order of the programs. The steps are bias, gate, residual sum and next norm,
or the rotation of heads.
"""

from dataclasses import dataclass
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specsim.fast.model.product_plan import BLOCK_N
from specsim.fast.model.rotary import Rotation, store_heads
from specsim.fast.model.rows import gated
from specsim.fast.runtime.gluon import barrier
from specsim.fast.runtime.launch import nearest

_N = gl.constexpr(BLOCK_N)
_PATIENCE = gl.constexpr(1 << 22)  # polls of a counter, each of about half a microsecond
PLAIN, GATED, HEADED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a product


@gluon.jit
@no_type_check
def _read(p, PAUSE: gl.constexpr):
    wait: gl.constexpr = "nanosleep.u32 20; " if PAUSE else ""
    return gl.inline_asm_elementwise(
        wait + "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [p.to(gl.int64)], gl.int64, False, 1
    )


@gluon.jit
@no_type_check
def _await(count_ptr, expected):
    """Wait until a counter has reached a number. A wait in vain ends the kernel with an error."""
    polls_left = _PATIENCE + 0
    count = _read(count_ptr, False)
    while count < expected:
        count = _read(count_ptr, True)
        polls_left -= 1
        if polls_left == 0:
            gl.inline_asm_elementwise("trap; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
@no_type_check
def _flat(acc, SIZE: gl.constexpr, R: gl.constexpr):
    """Order the numbers of a tile, [_N, R], as lanes and registers hold them, eight rows after eight rows.

    So a lane writes and reads four numbers of a part at a time.
    """
    return acc.reshape([8, 2, 8, R // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([SIZE])


@gluon.jit
@no_type_check
def _tile(flat, LAYOUT: gl.constexpr, R: gl.constexpr):
    """Return the numbers of _flat as a tile, [_N, R]."""
    acc = flat.reshape([R // 8, 8, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([_N, R])
    return gl.convert_layout(acc, LAYOUT, assert_trivial=True)


@gluon.jit
@no_type_check
def _store_part(acc, part_ptr, R: gl.constexpr):
    """Store a program's part of a tile, [_N, R], for other programs."""
    part = _flat(acc, _N * R, R)
    gl.store(part_ptr + gl.arange(0, _N * R, layout=part.type.layout), part)
    barrier()


@gluon.jit
@no_type_check
def _add_parts(total, parts_ptr, first, end, AT_A_TIME: gl.constexpr, R: gl.constexpr, OWN: gl.constexpr):
    """Add to a flat tile the parts of programs `first` to `end` - 1, in this order."""
    LAYOUT: gl.constexpr = total.type.layout
    SIZE: gl.constexpr = _N * OWN
    parts_ptr += gl.arange(0, SIZE, layout=LAYOUT)
    for program in range(first, end, AT_A_TIME):
        for i in gl.static_range(AT_A_TIME):
            mask = gl.full([SIZE], program + i < end, gl.int1, LAYOUT)
            total += gl.load(parts_ptr + (program + i) * (_N * R), mask=mask, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
@no_type_check
def summed_rows(acc, parts_ptr, count_ptr, first, S: gl.constexpr, R: gl.constexpr, OWN: gl.constexpr):
    """Add the parts of a tile for the rows that this program finishes, [_N, OWN].

    Other programs of the tile do so for theirs. Returns whether there are such rows, and the sum. The counter only
    grows.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, OWN, 16])
    total = gl.zeros([_N, OWN], gl.float32, LAYOUT)
    me = gl.program_id(0)
    _store_part(acc, parts_ptr + me * (_N * R), R)
    before = gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    part = me - first
    is_mine = part < R // OWN
    if is_mine:
        _await(count_ptr, before // S.finishers * S.finishers + S.finishers)
        parts_ptr += part * (_N * OWN)
        flat = _flat(total, _N * OWN, OWN)
        offs = gl.arange(0, _N * OWN, layout=flat.type.layout)
        flat = gl.load(parts_ptr + first * (_N * R) + offs, cache_modifier=".cg")
        flat = _add_parts(flat, parts_ptr, first + 1, first + S.finishers, S.finishers - 1, R, OWN)
        total = _tile(flat, LAYOUT, OWN)
    return is_mine, total


@gluon.jit
@no_type_check
def summed(acc, parts_ptr, count_ptr, first, last, R: gl.constexpr):
    """Add the parts of a tile, [_N, R], in the program that has the first one.

    The first part is the last one of its program, and the last part the first of its program, which wrote it long ago.
    Returns whether this program adds them, and the sum.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    me = gl.program_id(0)
    is_mine = me == first
    if is_mine:
        if last > first:
            _await(count_ptr, last - first)
            barrier()  # all lanes have seen it
            gl.store(count_ptr, 0)
            acc = _tile(_add_parts(_flat(acc, _N * R, R), parts_ptr, first + 1, last + 1, 1, R, R), LAYOUT, R)
    else:
        _store_part(acc, parts_ptr + me * (_N * R), R)
        gl.atomic_add(count_ptr, 1, sem="release", scope="gpu")
    return is_mine, acc


@dataclass(frozen=True)
class ProductShape:
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
    precedes_many_rows: bool  # the next kernel is such a product too


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
    """Take the steps after a product for a tile, [_N, R]: see specsim.fast.model.linear."""
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
            cos_sin_ptr = heads.cos_sin_ptr + 2 * row * HALF + offs
            cos = gl.load(cos_sin_ptr, mask=mask, other=0.0).to(gl.float32)
            sin = gl.load(cos_sin_ptr + HALF, mask=mask, other=0.0).to(gl.float32)
            rotation = Rotation(cos, sin, slot_R[None, :])
            query_ptr = heads.query_ptr
            store_heads(
                query_ptr, heads.kv_ptrs, rotation, row, head, offs, first, second, mask, S.heads, S.kv_heads, D
            )
