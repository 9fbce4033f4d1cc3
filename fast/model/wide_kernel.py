"""Kernel of wide products: one warp streams the weight by TMA, and eight multiply and finish tiles.

Weights are the rows of the matrix instructions, and the model's rows their columns. A kernel is launched before its
predecessor has ended, and streams weights meanwhile. Programs of one tile are neighbours and wait for each other, which
takes that a GPU starts programs in their order.
"""

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from specsim.fast.model.wide_finish import GATED, PLAIN, finish, scale_of
from specsim.fast.model.wide_parts import summed, summed_rows
from specsim.fast.model.wide_plan import BLOCK_K, BLOCK_N
from specsim.fast.runtime.gluon import next_slot
from specsim.fast.runtime.launch import Kernel, await_predecessor, let_successor_begin

_N, _K = gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_K)


class Ring(NamedTuple):
    """Slots in shared memory, and their barriers."""

    weights: Any
    rows: Any
    full: Any
    empty: Any


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
        slot, phase = next_slot(slot, phase, STAGES)
    if not S.precedes_wide:
        let_successor_begin(PDL)


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
        squares = scale_of(squares_ptr, row, num_rows, S.eps, S.inner, S.squares, OWN)
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
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(ring.empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        first = tile * S.blocks // S.share
        if S.finishers > 1:
            is_mine, total = summed_rows(acc, parts_ptr, counts_ptr + tile, first, S, R, OWN)
        elif S.most_parts > 1:
            last = ((tile + 1) * S.blocks - 1) // S.share
            is_mine, total = summed(acc, parts_ptr, counts_ptr + tile, first, last, R)
        else:
            is_mine, total = low >= 0, acc
        if is_mine:
            finish(total, scale, finish_ptrs, tile, row, num_rows, S, OWN, DTYPE)
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
