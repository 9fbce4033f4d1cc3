"""Attention of many pairs of a row and a query head on Hopper GPUs, in a pipeline of warps.

Four warps copy tiles of keys and values into a ring in shared memory. Two groups of four warps attend, from 64 pairs
each. While a group computes weights, the tensor cores multiply for the other, and for its own tile before.
The kernel of specsim.fast.attention serves everywhere else.
"""

import math
from typing import Any, NamedTuple, no_type_check

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specsim.fast.model.attention_plan import MANY, AttentionParts, AttentionPlan, assignment, tiles_of
from specsim.fast.model.metadata import WORD, AttentionMetadata
from specsim.fast.runtime.gluon import barrier, next_slot
from specsim.fast.runtime.launch import Kernel, await_input, nearest

BLOCK_C = gl.constexpr(128)  # keys of a tile
COPIERS = gl.constexpr(4)  # warps that copy
PAIRS = gl.constexpr(64)  # of a group of warps
_REGISTERS = 168  # of a thread, on average over 12 warps
COPIER_REGISTERS = gl.constexpr(40)
ATTENDING = gl.constexpr((12 * _REGISTERS - 4 * 40) // 8)  # registers of the others
_MANY = gl.constexpr(MANY)


class TileRing(NamedTuple):
    """Shared memory of a program."""

    tiles: gl.shared_memory_descriptor  # [STAGES, BLOCK_C, D], keys of a tile, then values of the tile before
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor  # [2, PAIRS, D]


class TileWork(NamedTuple):
    """A program's rows and keys. Keys are a request's prefix and then its extra keys."""

    low_row: gl.tensor
    num_rows: gl.tensor
    first_pair: gl.tensor
    key_len: gl.tensor  # keys of the prefix
    num_keys: gl.tensor
    low: gl.tensor  # first tile
    high: gl.tensor


@gluon.jit
@no_type_check
def _slots(table_ptr, extra_slots_ptr, tile, work, MASKED: gl.constexpr):
    """Load the slots of a tile's keys, with MASKED -1 past the last."""
    column = tile * BLOCK_C + gl.arange(0, BLOCK_C, layout=gl.BlockedLayout([1], [32], [COPIERS], [0]))
    if MASKED:
        slot = gl.load(table_ptr + 2 * column, mask=column < work.key_len, other=-1)
        mask = (column >= work.key_len) & (column < work.num_keys)
        slot = gl.maximum(slot, gl.load(extra_slots_ptr + column - work.key_len, mask=mask, other=-1))
    else:
        slot = gl.load(table_ptr + 2 * column)
    return slot


@gluon.jit
@no_type_check
def _copy_tile(base_ptr, slots, ring, slot, phase, MASKED: gl.constexpr, STRIDE: gl.constexpr, LAYOUT: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """Begin to copy the keys or values in these slots, with MASKED zeros for -1."""
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    slots = gl.convert_layout(slots, gl.SliceLayout(1, LAYOUT))[:, None]
    dim = gl.arange(0, ring.tiles.shape[2], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    source = base_ptr + slots.to(gl.int64) * STRIDE + dim
    if MASKED:
        async_copy.async_copy_global_to_shared(ring.tiles.index(slot), source, (slots >= 0) & (dim >= 0))
    else:
        async_copy.async_copy_global_to_shared(ring.tiles.index(slot), source)
    async_copy.mbarrier_arrive(ring.full.index(slot), increment_count=False)
    return next_slot(slot, phase, STAGES)


@gluon.jit
@no_type_check
def copy_tiles(kv_ptrs, table_ptr, extra_slots_ptr, work, ring, D: gl.constexpr, STRIDE: gl.constexpr,
               LAYOUT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Copy a program's tiles, the keys of each before the values of the one before it."""
    keys_ptr = kv_ptrs.keys_ptr + gl.program_id(0) * D
    values_ptr = kv_ptrs.values_ptr + gl.program_id(0) * D
    slot, phase = 0, 0
    slots = _slots(table_ptr, extra_slots_ptr, work.low, work, True)
    if work.high > work.low:
        slot, phase = _copy_tile(keys_ptr, slots, ring, slot, phase, True, STRIDE, LAYOUT, STAGES)
    last = gl.maximum(gl.minimum(work.key_len // BLOCK_C, work.high) - 1, work.low)
    for tile in range(work.low, last):  # whole tiles that whole tiles follow
        following = _slots(table_ptr, extra_slots_ptr, tile + 1, work, False)
        slot, phase = _copy_tile(keys_ptr, following, ring, slot, phase, False, STRIDE, LAYOUT, STAGES)
        slot, phase = _copy_tile(values_ptr, slots, ring, slot, phase, False, STRIDE, LAYOUT, STAGES)
        slots = following
    for tile in range(last, work.high):
        following = _slots(table_ptr, extra_slots_ptr, tile + 1, work, True)
        if tile + 1 < work.high:
            slot, phase = _copy_tile(keys_ptr, following, ring, slot, phase, True, STRIDE, LAYOUT, STAGES)
        slot, phase = _copy_tile(values_ptr, slots, ring, slot, phase, True, STRIDE, LAYOUT, STAGES)
        slots = following


def copy_layout(dim: int) -> gl.DistributedLinearLayout:
    """Make the layout of a copied tile: lanes copy 16 bytes each, and a warp's rows follow each other."""
    block, copiers = BLOCK_C.value, COPIERS.value
    lanes_of_row = dim // 8
    rows_of_lanes = 32 // lanes_of_row
    rows_of_warp = block // copiers
    lanes = [[0, 8 * i] for i in _powers(1, lanes_of_row)] + [[i, 0] for i in _powers(1, rows_of_lanes)]
    registers = [[0, i] for i in _powers(1, 8)] + [[i, 0] for i in _powers(rows_of_lanes, rows_of_warp)]
    warps = [[i, 0] for i in _powers(rows_of_warp, block)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block, dim])


def _powers(low: int, high: int) -> list[int]:
    """List the powers of two from low to below high."""
    return [low << i for i in range((high // low).bit_length() - 1)]


@gluon.jit
@no_type_check
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
@no_type_check
def _ones(count):
    """Make words whose `count` lowest bits are set, none or all where count is below 0 or above 32."""
    return gl.where(count >= WORD, -1, (1 << gl.minimum(gl.maximum(count, 0), WORD - 1)) - 1)


@gluon.jit
@no_type_check
def _masked(s, visible_ptr, num_words, prefix_len, row, is_row, tile, work):
    """Set the logits of keys that a row does not see to -inf."""
    by_word = s.reshape([PAIRS, BLOCK_C // WORD, WORD])
    WORDS: gl.constexpr = gl.SliceLayout(2, by_word.type.layout)
    BITS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, by_word.type.layout))
    prefix_len = gl.convert_layout(prefix_len, gl.SliceLayout(1, WORDS))[:, None]
    row = gl.convert_layout(row, gl.SliceLayout(1, WORDS))[:, None]
    is_row = gl.convert_layout(is_row, gl.SliceLayout(1, WORDS))[:, None]
    column = tile * BLOCK_C + WORD * gl.arange(0, BLOCK_C // WORD, layout=gl.SliceLayout(0, WORDS))[None, :]
    extra = column - work.key_len  # of the word's first bit
    index = extra >> 5
    own_ptr = visible_ptr + row * num_words + index
    low = gl.load(own_ptr, mask=is_row & (index >= 0) & (index < num_words), other=0).to(gl.uint32)
    high = gl.load(own_ptr + 1, mask=is_row & (index >= -1) & (index + 1 < num_words), other=0).to(gl.uint32)
    shift = (extra & (WORD - 1)).to(gl.uint32)
    words = ((low >> shift) | ((high << 1) << (WORD - 1 - shift))).to(gl.int32)
    words = (words & _ones(work.num_keys - column)) | _ones(prefix_len - column)  # [PAIRS, BLOCK_C / WORD]
    bit = gl.arange(0, WORD, layout=BITS)[None, None, :]
    seen = (words[:, :, None] >> bit) & 1 != 0
    return gl.convert_layout(gl.where(seen, by_word, float("-inf")).reshape([PAIRS, BLOCK_C]), s.type.layout)


@gluon.jit
@no_type_check
def _weights(s, top, SCALE: gl.constexpr):
    """Compute the weights of logits, the new largest logit, and the factor of earlier weights."""
    higher = gl.maximum(top, gl.max(s, axis=1))
    shift = gl.where(higher == float("-inf"), 0.0, higher * SCALE)
    return _exp2(s * SCALE - shift[:, None]), higher, _exp2(top * SCALE - shift)


@gluon.jit
@no_type_check
def _step(state, rows, visible_ptr, num_words, tile, work, ring, SIDE: gl.constexpr,
          SCALE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Multiply a tile's keys and the values of the tile before, and compute weights meanwhile."""
    total, top, acc, weight, slot, phase = state
    prefix_len, row, is_row = rows
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16])
    v_slot, v_phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(ring.full.index(slot), phase)
    mbarrier.wait(ring.full.index(v_slot), v_phase)
    fence_async_shared()
    s = gl.zeros([PAIRS, BLOCK_C], gl.float32, LOGITS)
    s = warpgroup_mma(ring.queries.index(SIDE), ring.tiles.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    acc = warpgroup_mma(weight, ring.tiles.index(v_slot), acc, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
    mbarrier.arrive(ring.empty.index(slot), count=1)
    if (tile + 1) * BLOCK_C > work.key_len:
        s = _masked(s, visible_ptr, num_words, prefix_len, row, is_row, tile, work)
    weight_f32, top, rescale = _weights(s, top, SCALE)
    total = total * rescale + gl.sum(weight_f32, axis=1)
    # The branch in this wait, which has ended already, keeps the compiler from awaiting the product before the weights.
    mbarrier.wait(ring.full.index(v_slot), v_phase)
    acc, total = warpgroup_mma_wait(num_outstanding=0, deps=[acc, total])
    mbarrier.arrive(ring.empty.index(v_slot), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    weight = gl.convert_layout(weight_f32.to(weight.dtype), weight.type.layout)
    slot, phase = next_slot(v_slot, v_phase, STAGES)
    return total, top, acc, weight, slot, phase


@gluon.jit
@no_type_check
def _fold(rows, visible_ptr, num_words, work, ring, SIDE: gl.constexpr, D: gl.constexpr, SCALE: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Fold a program's tiles for one group: (total [PAIRS], top [PAIRS], acc [PAIRS, D])."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    prefix_len, row, is_row = rows
    top = gl.full([PAIRS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, LOGITS))
    acc = gl.zeros([PAIRS, D], gl.float32, SUMS)
    if work.high > work.low:
        mbarrier.wait(ring.full.index(0), 0)
        fence_async_shared()
        s = gl.zeros([PAIRS, BLOCK_C], gl.float32, LOGITS)
        s = warpgroup_mma(
            ring.queries.index(SIDE), ring.tiles.index(0).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
        mbarrier.arrive(ring.empty.index(0), count=1)
        if (work.low + 1) * BLOCK_C > work.key_len:
            s = _masked(s, visible_ptr, num_words, prefix_len, row, is_row, work.low, work)
        weight, top, _ = _weights(s, top, SCALE)
        total = gl.sum(weight, axis=1)
        weight = gl.convert_layout(weight.to(ring.tiles.dtype), gl.DotOperandLayout(0, SUMS, 2))
        state = (total, top, acc, weight, 1, 0)
        for tile in range(work.low + 1, work.high):
            state = _step(state, rows, visible_ptr, num_words, tile, work, ring, SIDE, SCALE, STAGES)
        total, top, acc, weight, slot, phase = state
        mbarrier.wait(ring.full.index(slot), phase)
        fence_async_shared()
        acc = warpgroup_mma(weight, ring.tiles.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    dropped = (prefix_len == 0) & (work.key_len > 0)  # such a row has folded keys that it does not see
    out_dropped = gl.convert_layout(dropped, gl.SliceLayout(1, SUMS))[:, None]
    return gl.where(dropped, 0.0, total), gl.where(dropped, float("-inf"), top), gl.where(out_dropped, 0.0, acc)


@gluon.jit
@no_type_check
def _attend(out_ptr, query_ptr, metadata_ptrs, parts_ptrs, extras, pairs, part_head, num_splits, work, ring,
            SIDE: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SCALE: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    """Attend from one group's pairs to a program's tiles. place: of the part, counted over all parts and heads."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16]))
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    head = gl.program_id(0)
    heads = gl.num_programs(0)
    first = work.first_pair + SIDE * PAIRS
    pair = first + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, LOADED))[:, None]
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))[None, :]
    query_ptr += (work.low_row * heads + head) * GROUP * D
    mask = (pair // GROUP < work.num_rows) & (dim >= 0)
    query = gl.load(query_ptr + (pair // GROUP * heads * GROUP + pair % GROUP) * D + dim, mask=mask, other=0.0)
    ring.queries.index(SIDE).store(query)
    fence_async_shared()
    barrier()
    pair = first + gl.arange(0, PAIRS, layout=ROWS)
    row = pair // GROUP
    is_row = row < work.num_rows
    prefix_len = gl.load(metadata_ptrs.prefix_lens + work.low_row + row, mask=is_row, other=0)
    num_words = (extras + WORD - 1) // WORD
    visible_ptr = metadata_ptrs.visible + work.low_row * num_words
    total, top, acc = _fold((prefix_len, row, is_row), visible_ptr, num_words, work, ring, SIDE, D, SCALE, STAGES)
    SUMS: gl.constexpr = acc.type.layout
    pair_d = first + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, SUMS))[:, None]
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))[None, :]
    mask = (pair_d // GROUP < work.num_rows) & (dim >= 0)
    if parts_ptrs is not None:
        part = part_head * pairs
        if num_splits > 1:
            gl.store(parts_ptrs.stats + 2 * (part + pair), top * SCALE, mask=is_row)
            gl.store(parts_ptrs.stats + 2 * (part + pair) + 1, total, mask=is_row)
            gl.store(parts_ptrs.acc + (part + pair_d) * D + dim, acc, mask=mask)
    if num_splits == 1:
        divisor = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, SUMS))[:, None]
        out_ptr += (work.low_row * heads + head) * GROUP * D
        out = nearest(acc / divisor, out_ptr.dtype.element_ty)
        gl.store(out_ptr + (pair_d // GROUP * heads * GROUP + pair_d % GROUP) * D + dim, out, mask=mask)


@no_type_check
def _pipelined_kernel(
    out_ptr,
    query_ptr,
    kv_ptrs,
    metadata_ptrs,
    parts_ptrs,
    partition,
    extras,
    num_requests,
    pairs,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    SCALE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Attend from a block of rows and query heads of one key head to a part of a request's keys."""
    await_input(PDL)
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ring = TileRing(
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_C, D], TILES),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(DTYPE, [2, PAIRS, D], TILES),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=COPIERS * 32)
        mbarrier.init(ring.empty.index(i), count=2)
    head, unit, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    heads = gl.num_programs(0)
    split, num_splits, first_part = 0, 1, 0
    request = gl.minimum(unit, num_requests - 1)
    if partition is not None:
        offs = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [4], [0]))
        unit, split, num_splits, first_part, _ = assignment(offs, unit, metadata_ptrs, _MANY, num_requests, partition)
        # The loads of the only request need not wait for its assignment.
        request = gl.minimum(unit, num_requests - 1) if BLOCK_B > 1 else unit * 0
    is_real = unit < num_requests
    key_len = gl.load(metadata_ptrs.key_lens + request)
    num_extras = gl.load(metadata_ptrs.num_extras + request)
    low_row = gl.load(metadata_ptrs.row_starts + request)
    num_rows = (gl.load(metadata_ptrs.row_starts + request + 1) - low_row).to(gl.int32)
    num_rows = gl.where(is_real, num_rows, 0)
    low, high = tiles_of(split, gl.maximum(num_splits, 1), 0, gl.cdiv(key_len + num_extras, BLOCK_C))
    has_work = block * 2 * PAIRS < num_rows * GROUP
    low = gl.where(has_work, low, 0)  # slots of the first tile are loaded, whether there is work or not
    high = gl.where(has_work, high, 0)
    work = TileWork(low_row, num_rows, block * 2 * PAIRS, key_len, key_len + num_extras, low, high)
    table_ptr = kv_ptrs.table_ptr + gl.load(kv_ptrs.rows_ptr + request) * kv_ptrs.columns * 2
    extra_slots_ptr = metadata_ptrs.extra_slots + request.to(gl.int64) * extras
    part_head = 0
    if partition is not None:
        part_head = (first_part + split).to(gl.int64) * heads + head
        if is_real & (head + block + split == 0):
            gl.store(parts_ptrs.spans + 2 * request, first_part)
            gl.store(parts_ptrs.spans + 2 * request + 1, num_splits)
    gl.warp_specialize(
        [
            (_attend, (out_ptr, query_ptr, metadata_ptrs, parts_ptrs, extras, pairs, part_head, num_splits, work, ring,
                       0, GROUP, D, SCALE, STAGES)),
            (_attend, (out_ptr, query_ptr, metadata_ptrs, parts_ptrs, extras, pairs, part_head, num_splits, work, ring,
                       1, GROUP, D, SCALE, STAGES)),
            (copy_tiles, (kv_ptrs, table_ptr, extra_slots_ptr, work, ring, D, STRIDE, LAYOUT, STAGES)),
        ],
        [4, COPIERS],
        [ATTENDING, COPIER_REGISTERS],
    )  # fmt: skip


_kernel = Kernel(_pipelined_kernel, gluon.jit)


def attend_in_pipeline(
    out: torch.Tensor,
    query_RAD: torch.Tensor,
    kv_ptrs: Any,
    metadata: AttentionMetadata,
    parts: AttentionParts | None,
    plan: AttentionPlan,
    scale: float,
) -> None:
    """Write attention [R, A, D], or the parts that are then merged. kv_ptrs: PagedKV. scale: of q·k."""
    heads = query_RAD.shape[1] // plan.group
    head_dim = query_RAD.shape[2]
    _kernel[heads, plan.units, plan.blocks](
        out_ptr=out,
        query_ptr=query_RAD,
        kv_ptrs=kv_ptrs,
        metadata_ptrs=metadata.tensors,
        parts_ptrs=parts,
        partition=plan.partition,
        extras=metadata.extra_slots.shape[1],
        num_requests=len(metadata.num_extras),
        pairs=plan.pairs,
        GROUP=plan.group,
        D=head_dim,
        SCALE=scale * math.log2(math.e),
        BLOCK_B=plan.block_b,
        STRIDE=heads * head_dim,
        LAYOUT=copy_layout(head_dim),
        STAGES=plan.tiling.stages,
        num_warps=plan.tiling.warps,
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,
    )
