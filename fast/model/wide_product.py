"""Products of many rows on Hopper GPUs: one warp streams the weight by TMA, and eight multiply and finish tiles.

Weights are the rows of the matrix instructions, and the model's rows their columns. A kernel is launched before its
predecessor has ended, and streams weights meanwhile. The kernels of specsim.fast.model.linear serve everywhere else.
"""

import functools
from typing import NamedTuple, Self, no_type_check

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.rotary import Turns, store_heads
from specsim.fast.model.rows import gated
from specsim.fast.model.wide_plan import BLOCK_K, BLOCK_N, MOST_WIDE_ROWS, WidePlan
from specsim.fast.runtime.launch import (
    Kernel,
    await_predecessor,
    ceil_div,
    let_successor_begin,
    nearest,
    next_power_of_2,
)

PLAIN, GATED, HEADED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a product
_N, _K = gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_K)
_STAGE_BYTES = 226_000  # of tiles in shared memory
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7
MOST_BLOCKS = 4  # of rows, in one launch


class Heads(NamedTuple):
    """Memory to which a projection to queries, keys and values writes its heads."""

    query_ptr: torch.Tensor  # [R, A, D]
    kv_ptrs: KVTensors
    turns_ptr: torch.Tensor  # [R, 2, D/2], rotations
    slots_ptr: torch.Tensor  # i64 [R]

    def of(self, rows: slice) -> Self:
        """Return the heads of some rows."""
        names = ("query_ptr", "turns_ptr", "slots_ptr")
        return self._replace(**{name: getattr(self, name)[rows] for name in names})


class Finish(NamedTuple):
    """Operands and results of the steps after a product, None where there is no such step."""

    rows: torch.Tensor | None = None  # [R, N], results
    weighted: torch.Tensor | None = None  # [R, N], results times the next norm's weight
    squares: torch.Tensor | None = None  # f32 [R, tiles], parts of the results' squares
    base: torch.Tensor | None = None  # [R, N], added
    bias: torch.Tensor | None = None  # [N]
    next_norm: torch.Tensor | None = None  # [N]
    heads: Heads | None = None

    def of(self, rows: slice) -> Self:
        """Return the operands and results of some rows."""
        names = ("rows", "weighted", "squares", "base")
        own = {name: each[rows] for name in names if (each := getattr(self, name)) is not None}
        return self._replace(heads=None if self.heads is None else self.heads.of(rows), **own)


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
def _stream(
    weight,
    x,
    ring,
    full,
    empty,
    SHARE: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    D: gl.constexpr,
    PDL: gl.constexpr,
):
    """Stream a program's blocks of the weight and of the rows through the ring.

    The first weights are on their way before the rows exist.
    """
    first = gl.program_id(0) * SHARE
    end = gl.minimum(first + SHARE, TILES * BLOCKS)
    row = gl.program_id(1) * R
    early = gl.minimum(STAGES, end - first)
    for i in range(early):
        mbarrier.expect(full.index(i), (_N + R) * _K * 2)
        _copy_weight(weight, (first + i) // BLOCKS, (first + i) % BLOCKS, full.index(i), ring[0].index(i), KIND, D)
    await_predecessor(PDL)
    for i in range(early):
        tma.async_copy_global_to_shared(x, [row, (first + i) % BLOCKS * _K], full.index(i), ring[1].index(i))
    slot, phase = 0, 0
    for unit in range(first + early, end):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), (_N + R) * _K * 2)
        _copy_weight(weight, unit // BLOCKS, unit % BLOCKS, full.index(slot), ring[0].index(slot), KIND, D)
        tma.async_copy_global_to_shared(x, [row, unit % BLOCKS * _K], full.index(slot), ring[1].index(slot))
        slot, phase = _next(slot, phase, STAGES)
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
def _finish(
    acc,
    scale,
    finish_ptrs,
    tile,
    row,
    num_rows,
    N: gl.constexpr,
    TILES: gl.constexpr,
    STRIDE_OUT: gl.constexpr,
    STRIDE_BASE: gl.constexpr,
    R: gl.constexpr,
    KIND: gl.constexpr,
    DTYPE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
):
    """Take the steps after a product for a tile, [_N, R]: see specsim.fast.model.linear and qkv_projection."""
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
            base = gl.load(finish_ptrs.base + row * STRIDE_BASE + offs, mask=mask, other=0.0)
            out = (base.to(gl.float32) + out.to(gl.float32)).to(DTYPE)
        gl.store(finish_ptrs.rows + row * STRIDE_OUT + offs, out, mask=mask)
        if finish_ptrs.next_norm is not None:
            out = out.to(gl.float32)
            norm = gl.load(finish_ptrs.next_norm + offs, mask=offs < N, other=0.0).to(gl.float32)
            gl.store(finish_ptrs.weighted + row * N + offs, (out * norm).to(DTYPE), mask=mask)
            squares = gl.sum(gl.where(mask, out * out, 0.0), axis=0)
            gl.store(finish_ptrs.squares + row_R * TILES + tile, squares, mask=row_R < num_rows)
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
            gl.store(finish_ptrs.rows + row * STRIDE_OUT + offs, out, mask=mask)
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
            store_heads(heads.query_ptr, heads.kv_ptrs, turns, row, head, offs, first, second, mask, HEADS, KV_HEADS, D)


@gluon.jit
@no_type_check
def _summed(acc, parts_ptr, counts_ptr, tile, SHARE: gl.constexpr, BLOCKS: gl.constexpr, R: gl.constexpr):
    """Add the parts of a tile, in order, in the program that writes the last one.

    Returns whether this program does, and the sum, or in other programs the part. In memory a part has the order of
    lanes and registers, so that a lane writes and reads four numbers at a time.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    SIZE: gl.constexpr = _N * R
    me = gl.program_id(0)
    first = tile * BLOCKS // SHARE
    last = ((tile + 1) * BLOCKS - 1) // SHARE
    is_last = me >= 0
    if last > first:
        part = acc.reshape([8, 2, 8, R // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([SIZE])
        FLAT: gl.constexpr = part.type.layout
        place = gl.arange(0, SIZE, layout=FLAT)
        gl.store(parts_ptr + (2 * me + (me == first).to(gl.int32)) * SIZE + place, part)
        _barrier()
        is_last = gl.atomic_add(counts_ptr + tile, 1, sem="acq_rel", scope="gpu") == last - first
        if is_last:
            gl.store(counts_ptr + tile, 0)
            part = gl.load(parts_ptr + (2 * first + 1) * SIZE + place, cache_modifier=".cg")
            GROUP: gl.constexpr = 3 if R <= 64 else 1  # parts that are loaded at a time
            for program in range(first + 1, last + 1, GROUP):
                for i in gl.static_range(GROUP):
                    mask = gl.full([SIZE], program + i <= last, gl.int1, FLAT)
                    part_ptr = parts_ptr + 2 * (program + i) * SIZE
                    part += gl.load(part_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            acc = part.reshape([R // 8, 8, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([_N, R])
            acc = gl.convert_layout(acc, LAYOUT, assert_trivial=True)
    return is_last, acc


@gluon.jit
@no_type_check
def _multiply(
    ring,
    full,
    empty,
    finish_ptrs,
    squares_ptr,
    parts_ptr,
    counts_ptr,
    num_rows,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    STRIDE_OUT: gl.constexpr,
    STRIDE_BASE: gl.constexpr,
    SHARE: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    MOST: gl.constexpr,
    PARTS: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    DTYPE: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply a program's blocks, and finish the tiles whose last part it writes."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, R, 16])
    await_predecessor(PDL)
    low = gl.program_id(0) * SHARE
    end = gl.minimum(low + SHARE, TILES * BLOCKS)
    row = gl.program_id(1) * R
    parts_ptr += gl.program_id(1) * (2 * gl.num_programs(0) * _N * R)
    counts_ptr += gl.program_id(1) * TILES
    scale = gl.full([R], 1.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    if PARTS > 0:
        scale = gl.convert_layout(_scale(squares_ptr, row, num_rows, eps, K, PARTS, R), gl.SliceLayout(0, LAYOUT))
    slot, phase = 0, 0
    tile = low // BLOCKS
    while low < end:
        high = gl.minimum(end, (tile + 1) * BLOCKS)
        acc = gl.zeros([_N, R], gl.float32, LAYOUT)
        for unit in range(low, high):
            mbarrier.wait(full.index(slot), phase)
            acc = warpgroup_mma(ring[0].index(slot), ring[1].index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            # The block before has been multiplied.
            mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=unit > low)
            slot, phase = _next(slot, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        is_last = low >= 0
        if MOST > 1:
            is_last, acc = _summed(acc, parts_ptr, counts_ptr, tile, SHARE, BLOCKS, R)
        if is_last:
            _finish(
                acc, scale, finish_ptrs, tile, row, num_rows,
                N, TILES, STRIDE_OUT, STRIDE_BASE, R, KIND, DTYPE, HEADS, KV_HEADS, D,
            )  # fmt: skip
        low = high
        tile += 1


@no_type_check
def _wide_kernel(
    weight,
    x,
    finish_ptrs,
    squares_ptr,
    parts_ptr,
    counts_ptr,
    num_rows,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    STRIDE_OUT: gl.constexpr,
    STRIDE_BASE: gl.constexpr,
    SHARE: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    MOST: gl.constexpr,
    PARTS: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute a program's share of the product, in warps that stream and warps that multiply."""
    DTYPE: gl.constexpr = weight.dtype
    PLANES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ring = (
        gl.allocate_shared_memory(DTYPE, [STAGES, _N, _K], PLANES),
        gl.allocate_shared_memory(DTYPE, [STAGES, R, _K], PLANES),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    ring, full, empty, finish_ptrs, squares_ptr, parts_ptr, counts_ptr, num_rows, eps,
                    N, K, STRIDE_OUT, STRIDE_BASE, SHARE, TILES, BLOCKS, MOST, PARTS, R, STAGES, KIND, DTYPE,
                    HEADS, KV_HEADS, D, PDL,
                ),
            ),
            (_stream, (weight, x, ring, full, empty, SHARE, TILES, BLOCKS, R, STAGES, KIND, D, PDL)),
        ],
        [1],
        [40],
    )  # fmt: skip


_wide = Kernel(_wide_kernel, gluon.jit)


@functools.cache
def _counters(device: torch.device, count: int) -> torch.Tensor:
    """Allocate counters of tiles' parts, zeros before and after every product; products of a GPU follow each other."""
    return torch.zeros(count, dtype=torch.int32, device=device)


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


def multiply_wide(
    plan: WidePlan,
    x: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    finish: Finish,
    is_gated: bool = False,
) -> None:
    """Compute x Wᵀ and the steps of `finish` in one launch, up to MOST_BLOCKS blocks of rows at a time."""
    num_rows = len(x)
    if x.data_ptr() % 16 or x.stride(0) % 8:  # the copy engine reads 16 bytes at a time
        x = x.clone(memory_format=torch.contiguous_format)
    block = min(MOST_WIDE_ROWS, max(16, next_power_of_2(num_rows)))
    row_blocks = ceil_div(num_rows, block)
    if row_blocks > MOST_BLOCKS:
        most = MOST_BLOCKS * block
        for low in range(0, num_rows, most):
            some = slice(low, low + most)
            part = None if squares is None else squares[some]
            multiply_wide(plan, x[some], part, eps, weight, finish.of(some), is_gated)
        return
    size, inner = weight.shape
    heads = finish.heads
    kv_heads, head_dim = (0, 16) if heads is None else heads.kv_ptrs.keys_ptr.shape[1:]
    kind = (GATED if is_gated else PLAIN if heads is None else HEADED).value
    counters = _counters(x.device, next_power_of_2(row_blocks * plan.num_tiles))
    num_parts = row_blocks * 2 * plan.programs if plan.most_parts > 1 else 0
    _wide[plan.programs, row_blocks](
        weight=_weight_descriptor(weight, kind, head_dim),
        x=TensorDescriptor(x, [num_rows, inner], [x.stride(0), 1], [block, BLOCK_K], _layout(2)),
        finish_ptrs=finish,
        squares_ptr=squares,
        parts_ptr=x.new_empty(num_parts * BLOCK_N * block, dtype=torch.float32),
        counts_ptr=counters,
        num_rows=num_rows,
        eps=eps,
        N=size,
        K=inner,
        STRIDE_OUT=0 if finish.rows is None else finish.rows.stride(0),
        STRIDE_BASE=0 if finish.base is None else finish.base.stride(0),
        SHARE=plan.share,
        TILES=plan.num_tiles,
        BLOCKS=plan.blocks,
        MOST=plan.most_parts,
        PARTS=0 if squares is None else squares.shape[1],
        R=block,
        STAGES=min(12, _STAGE_BYTES // (2 * BLOCK_K * (BLOCK_N + block))),
        KIND=kind,
        HEADS=0 if heads is None else heads.query_ptr.shape[1],
        KV_HEADS=kv_heads,
        D=head_dim,
        num_warps=8,
        maxnreg=168,
    )
