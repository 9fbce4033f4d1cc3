"""Kernel of wide products: one warp streams the weight by TMA, and eight multiply and finish tiles.

Weights are the rows of the matrix instructions, and the model's rows their columns. A kernel is launched before its
predecessor has ended, and streams weights meanwhile. Programs of one tile are neighbours and wait for each other, which
takes that a GPU starts programs in their order.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from specsim.fast.model.rotary import Turns, store_heads
from specsim.fast.model.rows import gated
from specsim.fast.model.wide_plan import BLOCK_K, BLOCK_N
from specsim.fast.runtime.gluon import barrier
from specsim.fast.runtime.launch import Kernel, await_predecessor, let_successor_begin, nearest

PLAIN, GATED, HEADED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a product
_N, _K = gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_K)
_PATIENCE = gl.constexpr(1 << 22)  # polls of a counter, each of about half a microsecond


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


class Ring(NamedTuple):
    """Slots in shared memory, and their barriers."""

    weights: Any
    rows: Any
    full: Any
    empty: Any


@gluon.jit
@no_type_check
def _next(slot, phase, STAGES: gl.constexpr):
    """Compute the next slot of the ring, and the phase of its barriers."""
    is_last = slot == STAGES - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
@no_type_check
def _copy_weight(weight, tile, block, full, to, KIND: gl.constexpr, D: gl.constexpr):
    """Begin to copy a block of a tile, [_N, _K].

    Pairs that an epilogue needs together, gate and up or the halves of a head, alternate every eight rows.
    """
    if KIND == PLAIN:
        tma.async_copy_global_to_shared(weight, [tile * _N, block * _K], full, to)
    elif KIND == GATED:
        to = to._reinterpret(weight.dtype, weight.block_shape, weight.layout)
        tma.async_copy_global_to_shared(weight, [tile * (_N // 16), 0, 0, block * _K], full, to)
    else:
        to = to._reinterpret(weight.dtype, weight.block_shape, weight.layout)
        tma.async_copy_global_to_shared(weight, [tile * (_N // D), 0, 0, 0, block * _K], full, to)


@gluon.jit
@no_type_check
def _stream(weight, x, ring, S: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):
    """Stream a program's blocks of the weight and of the rows through the ring.

    The first weights are on their way before the rows exist. Programs of a wide product may begin wherever one of these
    has ended. Those of another kernel begin later, or they would share the multiprocessors that are free now.
    """
    first = gl.program_id(0) * S.share
    end = gl.minimum(first + S.share, S.tiles * S.blocks)
    row = gl.program_id(1) * R
    early = gl.minimum(STAGES, end - first)
    for i in range(early):
        full = ring.full.index(i)
        mbarrier.expect(full, (_N + R) * _K * 2)
        tile = (first + i) // S.blocks
        _copy_weight(weight, tile, (first + i) % S.blocks, full, ring.weights.index(i), S.kind, S.head_dim)
    await_predecessor(PDL)
    if S.precedes_wide:
        let_successor_begin(PDL)
    for i in range(early):
        place = (first + i) % S.blocks * _K
        tma.async_copy_global_to_shared(x, [row, place], ring.full.index(i), ring.rows.index(i))
    slot, phase = 0, 0
    for unit in range(first + early, end):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, (_N + R) * _K * 2)
        _copy_weight(weight, unit // S.blocks, unit % S.blocks, full, ring.weights.index(slot), S.kind, S.head_dim)
        tma.async_copy_global_to_shared(x, [row, unit % S.blocks * _K], full, ring.rows.index(slot))
        slot, phase = _next(slot, phase, STAGES)
    if not S.precedes_wide:
        let_successor_begin(PDL)


@gluon.jit
@no_type_check
def _scale(squares_ptr, row, num_rows, eps, K: gl.constexpr, PARTS: gl.constexpr, R: gl.constexpr):
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
def _finish(acc, scale, finish_ptrs, tile, row, num_rows, S: gl.constexpr, R: gl.constexpr, DTYPE: gl.constexpr):
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
def _summed_rows(acc, parts_ptr, count_ptr, first, S: gl.constexpr, R: gl.constexpr, OWN: gl.constexpr):
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
def _summed(acc, parts_ptr, count_ptr, first, last, R: gl.constexpr):
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


@gluon.jit
@no_type_check
def _multiply(
    ring, finish_ptrs, squares_ptr, parts_ptr, counts_ptr, num_rows,
    S: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply a program's blocks, and finish tiles, or some rows of its tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, R, 16])
    OWN: gl.constexpr = max(8, R // S.finishers)  # rows that a program finishes
    OWN_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, OWN, 16])
    await_predecessor(PDL)
    low = gl.program_id(0) * S.share
    end = gl.minimum(low + S.share, S.tiles * S.blocks)
    parts_ptr += gl.program_id(1) * (gl.num_programs(0) * _N * R)
    counts_ptr += gl.program_id(1) * S.tiles
    row = gl.program_id(1) * R + gl.program_id(0) % S.finishers * OWN
    scale = gl.full([OWN], 1.0, gl.float32, gl.SliceLayout(0, OWN_LAYOUT))
    if S.squares > 0:
        squares = _scale(squares_ptr, row, num_rows, S.eps, S.inner, S.squares, OWN)
        scale = gl.convert_layout(squares, gl.SliceLayout(0, OWN_LAYOUT))
    slot, phase = 0, 0
    tile = low // S.blocks
    while low < end:
        high = gl.minimum(end, (tile + 1) * S.blocks)
        acc = gl.zeros([_N, R], gl.float32, LAYOUT)
        for unit in range(low, high):
            mbarrier.wait(ring.full.index(slot), phase)
            acc = warpgroup_mma(ring.weights.index(slot), ring.rows.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            # The block before has been multiplied.
            mbarrier.arrive(ring.empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=unit > low)
            slot, phase = _next(slot, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(ring.empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        first = tile * S.blocks // S.share
        if S.finishers > 1:
            is_mine, total = _summed_rows(acc, parts_ptr, counts_ptr + tile, first, S, R, OWN)
        elif S.most_parts > 1:
            last = ((tile + 1) * S.blocks - 1) // S.share
            is_mine, total = _summed(acc, parts_ptr, counts_ptr + tile, first, last, R)
        else:
            is_mine, total = low >= 0, acc
        if is_mine:
            _finish(total, scale, finish_ptrs, tile, row, num_rows, S, OWN, DTYPE)
        low = high
        tile += 1


@no_type_check
def _wide_kernel(
    weight, x, finish_ptrs, squares_ptr, parts_ptr, counts_ptr, num_rows,
    S: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute a program's share of the product, in warps that stream and warps that multiply."""
    DTYPE: gl.constexpr = weight.dtype
    PLANES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(DTYPE, [STAGES, _N, _K], PLANES)
    rows = gl.allocate_shared_memory(DTYPE, [STAGES, R, _K], PLANES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    ring = Ring(weights, rows, full, empty)
    gl.warp_specialize(
        [
            (
                _multiply,
                (ring, finish_ptrs, squares_ptr, parts_ptr, counts_ptr, num_rows, S, R, STAGES, DTYPE, PDL),
            ),
            (_stream, (weight, x, ring, S, R, STAGES, PDL)),
        ],
        [1],
        [40],
    )


wide = Kernel(_wide_kernel, gluon.jit)
