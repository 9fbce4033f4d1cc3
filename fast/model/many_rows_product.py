"""Products of many rows on Hopper GPUs: one warp streams the weight by TMA, and eight multiply and finish tiles.

Weights are the rows of the matrix instructions, and the model's rows their columns. A kernel is launched before its
predecessor has ended, and streams weights meanwhile. Programs of one tile are neighbours and wait for each other, which
takes that a GPU starts programs in their order. The kernels of specsim.fast.model.linear serve everywhere else.
"""

import functools
from typing import Any, NamedTuple, Self, no_type_check

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specsim.fast.model.many_rows_epilogue import (
    GATED,
    HEADED,
    PLAIN,
    ProductShape,
    finish,
    scale_of,
    summed,
    summed_rows,
)
from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.product_plan import BLOCK_K, BLOCK_N, MOST_BLOCK_ROWS, ManyRowsPlan
from specsim.fast.runtime.gluon import Constants, next_slot
from specsim.fast.runtime.launch import Kernel, await_predecessor, ceil_div, let_successor_begin, next_power_of_2

_N, _K = gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_K)
_STAGE_BYTES = 226_000  # of tiles in shared memory
MOST_BLOCKS = 4  # of rows, in one launch


class WeightRing(NamedTuple):
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

    The first weights are on their way before the rows exist. Programs of such a product may begin wherever one of these
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
    if S.precedes_many_rows:
        let_successor_begin(PDL)
    for i in range(early):
        first_k = (first + i) % S.blocks * _K
        tma.async_copy_global_to_shared(x, [row, first_k], ring.full.index(i), ring.rows.index(i))
    slot, phase = 0, 0
    for unit in range(first + early, end):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, (_N + R) * _K * 2)
        _copy_weight(weight, unit // S.blocks, unit % S.blocks, full, ring.weights.index(slot), S.kind, S.head_dim)
        tma.async_copy_global_to_shared(x, [row, unit % S.blocks * _K], full, ring.rows.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
    if not S.precedes_many_rows:
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
    ring = WeightRing(weights, rows, full, empty)
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


class HeadOutputs(NamedTuple):
    """Memory to which a projection to queries, keys and values writes its heads."""

    query_ptr: torch.Tensor  # [R, A, D]
    kv_ptrs: KVTensors
    cos_sin_ptr: torch.Tensor  # [R, 2, D/2], rotations
    slots_ptr: torch.Tensor  # i64 [R]

    def of(self, rows: slice) -> Self:
        """Return the heads of some rows."""
        names = ("query_ptr", "cos_sin_ptr", "slots_ptr")
        return self._replace(**{name: getattr(self, name)[rows] for name in names})


class ProductEpilogue(NamedTuple):
    """Operands and results of the steps after a product, None where there is no such step."""

    rows: torch.Tensor | None = None  # [R, N], results
    weighted: torch.Tensor | None = None  # [R, N], results times the next norm's weight
    squares: torch.Tensor | None = None  # f32 [R, tiles], parts of the results' squares
    base: torch.Tensor | None = None  # [R, N], added
    bias: torch.Tensor | None = None  # [N]
    next_norm: torch.Tensor | None = None  # [N]
    heads: HeadOutputs | None = None

    def of(self, rows: slice) -> Self:
        """Return the operands and results of some rows."""
        names = ("rows", "weighted", "squares", "base")
        operands = {name: operand[rows] for name in names if (operand := getattr(self, name)) is not None}
        return self._replace(heads=None if self.heads is None else self.heads.of(rows), **operands)


@functools.cache
def _counters(device: torch.device, plan: ManyRowsPlan, row_blocks: int) -> torch.Tensor:
    """Allocate counters of tiles' parts, of a plan whose products follow each other."""
    return torch.zeros(row_blocks * plan.num_tiles, dtype=torch.int64, device=device)


def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 16, rank=rank)


def _weight_descriptor(weight: torch.Tensor, kind: int, head_dim: int) -> TensorDescriptor:
    """Describe the weight's tiles to the copy engine, with pairs eight rows apart."""
    size, inner = weight.shape
    if kind == PLAIN.value:
        return TensorDescriptor(weight, [size, inner], [inner, 1], [BLOCK_N, BLOCK_K], _layout(2))
    if kind == GATED.value:
        shape = [size // 16, 2, 8, inner]
        strides = [8 * inner, size // 2 * inner, inner, 1]
        return TensorDescriptor(weight, shape, strides, [BLOCK_N // 16, 2, 8, BLOCK_K], _layout(4))
    shape = [size // head_dim, head_dim // 16, 2, 8, inner]
    strides = [head_dim * inner, 8 * inner, head_dim // 2 * inner, inner, 1]
    block = [BLOCK_N // head_dim, head_dim // 16, 2, 8, BLOCK_K]
    return TensorDescriptor(weight, shape, strides, block, _layout(5))


def multiply_many_rows(
    plan: ManyRowsPlan,
    x: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    finish: ProductEpilogue,
    is_gated: bool = False,
) -> None:
    """Compute x Wᵀ and the steps of `finish` in one launch, up to MOST_BLOCKS blocks of rows at a time."""
    num_rows = len(x)
    if x.data_ptr() % 16 or x.stride(0) % 8:  # the copy engine reads 16 bytes at a time
        x = x.clone(memory_format=torch.contiguous_format)
    block = min(MOST_BLOCK_ROWS, max(16, next_power_of_2(num_rows)))
    row_blocks = ceil_div(num_rows, block)
    if row_blocks > MOST_BLOCKS:
        most = MOST_BLOCKS * block
        for low in range(0, num_rows, most):
            some = slice(low, low + most)
            part = None if squares is None else squares[some]
            multiply_many_rows(plan, x[some], part, eps, weight, finish.of(some), is_gated)
        return
    size, inner = weight.shape
    heads = finish.heads
    kv_heads, head_dim = (0, 16) if heads is None else heads.kv_ptrs.keys_ptr.shape[1:]
    shape = ProductShape(
        size=size,
        inner=inner,
        stride_out=0 if finish.rows is None else finish.rows.stride(0),
        stride_base=0 if finish.base is None else finish.base.stride(0),
        share=plan.share,
        tiles=plan.num_tiles,
        blocks=plan.blocks,
        most_parts=plan.most_parts,
        finishers=plan.finishers,
        squares=0 if squares is None else squares.shape[1],
        kind=(GATED if is_gated else PLAIN if heads is None else HEADED).value,
        heads=0 if heads is None else heads.query_ptr.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
        precedes_many_rows=is_gated or finish.base is not None,
    )
    num_parts = row_blocks * plan.programs if plan.most_parts > 1 else 0
    wide[plan.programs, row_blocks](
        weight=_weight_descriptor(weight, shape.kind, head_dim),
        x=TensorDescriptor(x, [num_rows, inner], [x.stride(0), 1], [block, BLOCK_K], _layout(2)),
        finish_ptrs=finish,
        squares_ptr=squares,
        parts_ptr=x.new_empty(num_parts * BLOCK_N * block, dtype=torch.float32),
        counts_ptr=_counters(x.device, plan, row_blocks),
        num_rows=num_rows,
        S=Constants(shape),
        R=block,
        STAGES=min(12, _STAGE_BYTES // (2 * BLOCK_K * (BLOCK_N + block))),
        num_warps=8,
        maxnreg=168,
    )
