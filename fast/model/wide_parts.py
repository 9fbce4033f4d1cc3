"""Sums of a wide product's tiles from the parts of several programs, always in the order of the programs."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specsim.fast.model.wide_plan import BLOCK_N
from specsim.fast.runtime.gluon import barrier

_N = gl.constexpr(BLOCK_N)
_PATIENCE = gl.constexpr(1 << 22)  # polls of a counter, each of about half a microsecond


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
    left = _PATIENCE + 0
    count = _read(count_ptr, False)
    while count < expected:
        count = _read(count_ptr, True)
        left -= 1
        if left == 0:
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
    own = me - first
    is_mine = own < R // OWN
    if is_mine:
        _await(count_ptr, before // S.finishers * S.finishers + S.finishers)
        parts_ptr += own * (_N * OWN)
        flat = _flat(total, _N * OWN, OWN)
        place = gl.arange(0, _N * OWN, layout=flat.type.layout)
        flat = gl.load(parts_ptr + first * (_N * R) + place, cache_modifier=".cg")
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
