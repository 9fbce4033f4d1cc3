"""Copies of keys and values into the shared memory of an attention pipeline, by some of its warps."""

from typing import NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from specsim.fast.runtime.gluon import next_slot

BLOCK_C = gl.constexpr(128)  # keys of a tile
COPIERS = gl.constexpr(4)  # warps that copy


class Ring(NamedTuple):
    """Shared memory of a program."""

    tiles: gl.shared_memory_descriptor  # [STAGES, BLOCK_C, D], keys of a tile, then values of the tile before
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor  # [2, PAIRS, D]


class Work(NamedTuple):
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
    own = _slots(table_ptr, extra_slots_ptr, work.low, work, True)
    if work.high > work.low:
        slot, phase = _copy_tile(keys_ptr, own, ring, slot, phase, True, STRIDE, LAYOUT, STAGES)
    last = gl.maximum(gl.minimum(work.key_len // BLOCK_C, work.high) - 1, work.low)
    for tile in range(work.low, last):  # whole tiles that whole tiles follow
        following = _slots(table_ptr, extra_slots_ptr, tile + 1, work, False)
        slot, phase = _copy_tile(keys_ptr, following, ring, slot, phase, False, STRIDE, LAYOUT, STAGES)
        slot, phase = _copy_tile(values_ptr, own, ring, slot, phase, False, STRIDE, LAYOUT, STAGES)
        own = following
    for tile in range(last, work.high):
        following = _slots(table_ptr, extra_slots_ptr, tile + 1, work, True)
        if tile + 1 < work.high:
            slot, phase = _copy_tile(keys_ptr, following, ring, slot, phase, True, STRIDE, LAYOUT, STAGES)
        slot, phase = _copy_tile(values_ptr, own, ring, slot, phase, True, STRIDE, LAYOUT, STAGES)
        own = following


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
