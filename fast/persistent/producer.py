"""Producer of the persistent forward: one warp streams weights, keys and values through the ring."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from specsim.fast.persistent.memory import COLUMNS, FLIGHT, HALVES, KV, D, next_slot, own_tiles, span_of, unit_of

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))


@gluon.jit
@no_type_check
def _throttle(ring, slot, S: gl.constexpr):
    """Wait until the fill FLIGHT places before has arrived, as signals wait behind all copies on their way."""
    wraps = slot[0] < FLIGHT
    before = gl.where(wraps, slot[0] + (S.ring - FLIGHT), slot[0] - FLIGHT)
    mbarrier.wait(ring.full.index(before), gl.where(wraps, slot[1] ^ 1, slot[1]))


@gluon.jit
@no_type_check
def _stream(weight, layer, ring, slot, HALF: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr,
            S: gl.constexpr):  # fmt: skip
    """Stream a weight's tiles. HALF: rows of the two halves that give a tile 8 rows each; 0: 16 successive rows."""
    STAGES: gl.constexpr = (DEPTH + 1023) // 1024
    TOGETHER: gl.constexpr = 1 if DEPTH <= 4096 else 2
    count = own_tiles(TILES, S)
    for first in range(0, count, TOGETHER):
        pair = gl.minimum(count - first, TOGETHER) - 1  # 1 for two tiles
        for s in range(STAGES << pair):
            tile = gl.program_id(0) + S.programs * (first + (s & pair))
            k = (s >> pair) * 16
            bar = ring.full.index(slot[0])
            mbarrier.wait(ring.empty.index(slot[0]), slot[1] ^ 1)
            _throttle(ring, slot, S)
            mbarrier.expect(bar, 32768)
            to = ring.slots.index(slot[0])
            if HALF > 0:
                at = layer * (TILES * 16 // HALF) + tile // (HALF // 8) * 2
                to = to._reinterpret(gl.bfloat16, [16, 2, 8, 64], HALVES)
                tma.async_copy_global_to_shared(weight, [k, at, tile % (HALF // 8) * 8, 0], bar, to)
            else:
                tma.async_copy_global_to_shared(weight, [k, layer * TILES * 16 + tile * 16, 0], bar, to)
            slot = next_slot(slot, S.ring)
    return slot


@gluon.jit
@no_type_check
def _slots_of(table, column, first, length):
    """Load the slots of 64 columns, -1 for columns that are not visible, in four parts."""
    a = gl.load(table + column, (column >= first) & (column < length), -1).to(gl.int32)
    b = gl.load(table + column + 16, (column + 16 >= first) & (column + 16 < length), -1).to(gl.int32)
    c = gl.load(table + column + 32, (column + 32 >= first) & (column + 32 < length), -1).to(gl.int32)
    d = gl.load(table + column + 48, (column + 48 >= first) & (column + 48 < length), -1).to(gl.int32)
    return a, b, c, d


@gluon.jit
@no_type_check
def _stream_keys(keys, values, table, meta, layer, length, head, split, ring, slot, S: gl.constexpr):
    """Copy keys and values of the prefix columns of this program's part."""
    dim = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))[None, :] + head * D
    first, low, high = span_of(meta, layer, length, split, S)
    column = first + gl.arange(0, 16, layout=LANES) + low * COLUMNS
    following = _slots_of(table, column, first, length)
    for _ in range(low, high):
        own = following
        column += COLUMNS
        following = _slots_of(table, column, first, length)
        mbarrier.wait(ring.empty.index(slot[0]), slot[1] ^ 1)
        _throttle(ring, slot, S)
        to = ring.slots.index(slot[0])._reinterpret(gl.bfloat16, [2, 64, 128], KV)
        for i in gl.static_range(4):
            source = gl.convert_layout(own[i], gl.SliceLayout(1, COPY))[:, None]
            at = source * (S.kv_heads * 128) + dim
            mask = (source >= 0) & (dim >= 0)
            async_copy.async_copy_global_to_shared(to.index(0).slice(i * 16, 16), keys + at, mask)
            async_copy.async_copy_global_to_shared(to.index(1).slice(i * 16, 16), values + at, mask)
        async_copy.mbarrier_arrive(ring.full.index(slot[0]))
        mbarrier.arrive(ring.full.index(slot[0]), count=1)
        slot = next_slot(slot, S.ring)
    return slot


@gluon.jit
@no_type_check
def producer(qkv, o, gate_up, down, cache, meta, num_slots, columns, ring, S: gl.constexpr):
    """Stream all layers' weights, keys and values."""
    request, head, split = unit_of(gl.program_id(0), 0, S)
    length = gl.load(meta.key_lens + request)
    table = meta.table + gl.load(meta.table_rows + request) * columns
    slot = (0, 0)
    for layer in range(S.layers):
        slot = _stream(qkv, layer, ring, slot, 64, S.qkv_tiles, S.hidden, S)
        if split < S.splits:
            base = layer.to(gl.int64) * num_slots * (S.kv_heads * 128)
            keys, values = cache[0] + base, cache[1] + base
            for i in range(S.turns):
                if S.turns > 1:
                    length = gl.load(meta.key_lens + i)
                    table = meta.table + gl.load(meta.table_rows + i) * columns
                slot = _stream_keys(keys, values, table, meta, layer, length, head, split, ring, slot, S)
        slot = _stream(o, layer, ring, slot, 0, S.residual_tiles, S.attended, S)
        slot = _stream(gate_up, layer, ring, slot, S.inner, S.gate_up_tiles, S.hidden, S)
        slot = _stream(down, layer, ring, slot, 0, S.residual_tiles, S.inner, S)
