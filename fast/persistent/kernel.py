"""The persistent forward in Gluon, for GPUs of compute capability 9.

Every program is resident and has five roles. The producer (one warp) streams weights, then keys and values, through a
ring in shared memory; it waits for free slots and for the copies before the last one. The multiplier (eight warps)
multiplies and attends (attention.py). Two finishers (a warp each, finisher.py) take its sums: scale, rotation, KV
write, gate, residual sum, and squares for the next norm. The poller (a warp, memory.py) awaits the other programs'
counters and wakes the other roles.

The order of everything stands in schedule.py, and S is a ForwardSchedule. memory.py has what programs and roles share.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2, tma

from specsim.fast.persistent.attention import attend, merge
from specsim.fast.persistent.finisher import finisher
from specsim.fast.persistent.memory import (
    COLUMNS,
    FLIGHT,
    HALVES,
    KV,
    SHARES,
    SUMS,
    WAKES,
    WEIGHTS,
    D,
    RoleRing,
    next_slot,
    own_tiles,
    poller,
    signal,
    span_of,
    unit_of,
    woken,
)

_EIGHTHS = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])  # a warp takes one eighth of a stage's inputs
MMA = gl.constexpr(_EIGHTHS)
A = gl.constexpr(gl.DotOperandLayout(0, _EIGHTHS, 2))
B = gl.constexpr(gl.DotOperandLayout(1, _EIGHTHS, 2))
STORED = gl.constexpr(gl.DotOperandLayout(1, _EIGHTHS, 8))  # of inputs in the order of _place
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))


@gluon.jit
@no_type_check
def _inputs(x, K: gl.constexpr, k, S: gl.constexpr):
    """Load 512 inputs of every row; zeros past the last."""
    part = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, STORED)))[:, None, None]
    k_offs = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, STORED)))[None, :, None]
    n = gl.arange(0, S.width, layout=gl.SliceLayout(0, gl.SliceLayout(1, STORED)))[None, None, :]
    k_offs = part * 64 + k_offs + k * 512
    mask = (k_offs >= 0) & (n < S.rows) & (k < (K + 511) // 512)
    if K % 512 != 0:
        mask = mask & (k_offs < K)
    stored = gl.load(x + k_offs + n * K, mask=mask, other=0.0, cache_modifier=".cg")
    stored = stored.reshape([8, 2, 4, 4, 2, S.width]).permute((0, 1, 3, 2, 4, 5)).reshape([8, 64, S.width])
    return gl.convert_layout(stored, B, assert_trivial=True)


@gluon.jit
@no_type_check
def _consume(ring, slot, low_sum, high_sum, x, S: gl.constexpr):
    mbarrier.wait(ring.full.index(slot[0]), slot[1])
    w = ring.slots.index(slot[0])
    low, high = w.slice(0, 8).load(A), w.slice(8, 8).load(A)
    mbarrier.arrive(ring.empty.index(slot[0]), count=1)
    return next_slot(slot, S.ring), mma_v2(low, x[0], low_sum), mma_v2(high, x[1], high_sum)


@gluon.jit
@no_type_check
def _hand_over(ring, done, value):
    mbarrier.wait(ring.sums_empty.index(done[0]), done[1] ^ 1)
    ring.sums.index(done[0]).store(value)
    mbarrier.arrive(ring.sums_full.index(done[0]), count=1)
    return next_slot(done, SUMS)


@gluon.jit
@no_type_check
def _held_inputs(x, K: gl.constexpr, S: gl.constexpr):
    """Load all inputs of the rows, up to 4,096."""
    held = ()
    for k in gl.static_range((K + 1023) // 1024):
        held = held + ((_inputs(x, K, 2 * k, S), _inputs(x, K, 2 * k + 1, S)),)  # noqa: RUF005 - Triton unpacks no tuple
    return held


@gluon.jit
@no_type_check
def _held(held, ring, slot, done, S: gl.constexpr):
    """Multiply one tile with rows that registers hold."""
    c = gl.zeros([8, 16, S.width], gl.float32, MMA)
    e = gl.zeros([8, 16, S.width], gl.float32, MMA)
    for k in gl.static_range(len(held)):
        slot, c, e = _consume(ring, slot, c, e, held[k], S)
    return slot, _hand_over(ring, done, c + e)


@gluon.jit
@no_type_check
def _paired(x, ring, slot, done, turn, K: gl.constexpr, CUT: gl.constexpr, TWO: gl.constexpr, S: gl.constexpr):
    """Multiply two tiles (TWO) or one, with inputs that are loaded a few stages ahead.

    This is a loop over stages and not unrolled, as all roles' code has to stay in the multiprocessor's cache.
    """
    AHEAD: gl.constexpr = 3 if S.width == 8 else 1  # at most CUT
    ahead = ()
    for k in gl.static_range(AHEAD):
        ahead = ahead + ((_inputs(x, K, 2 * k, S), _inputs(x, K, 2 * k + 1, S)),)  # noqa: RUF005 - as above
    c0 = gl.zeros([8, 16, S.width], gl.float32, MMA)
    e0, c1, e1 = c0, c0, c0
    for k in range((K + 1023) // 1024):
        if CUT > 0:
            woken(ring, turn, S, k + AHEAD == CUT)
        following = (_inputs(x, K, 2 * (k + AHEAD), S), _inputs(x, K, 2 * (k + AHEAD) + 1, S))
        slot, c0, e0 = _consume(ring, slot, c0, e0, ahead[0], S)
        if TWO:
            slot, c1, e1 = _consume(ring, slot, c1, e1, ahead[0], S)
        if AHEAD == 3:
            ahead = (ahead[1], ahead[2], following)
        else:
            ahead = (following,)
    done = _hand_over(ring, done, c0 + e0)
    if TWO:
        done = _hand_over(ring, done, c1 + e1)
    return slot, done, turn + (1 if CUT > 0 else 0)


@gluon.jit
@no_type_check
def product(x, ring, slot, done, turn, count, K: gl.constexpr, ODD: gl.constexpr, CUT: gl.constexpr, S: gl.constexpr):
    """Multiply `count` tiles of this program, after their dependency. ODD: whether that may be an odd number.

    CUT: the first stage whose inputs have a second dependency; 0 if it is the first, -1 if there is none.
    """
    FIRST: gl.constexpr = 1 if CUT > 0 else 0
    turn = woken(ring, turn, S)
    if CUT == 0:
        turn = woken(ring, turn, S)
    if K <= 4096:
        held = _held_inputs(x, K, S)
        for _ in range(count):
            slot, done = _held(held, ring, slot, done, S)
    else:
        if FIRST:
            slot, done, turn = _paired(x, ring, slot, done, turn, K, CUT, True, S)
        for _ in range(count // 2 - FIRST):
            slot, done, turn = _paired(x, ring, slot, done, turn, K, -1, True, S)
        if ODD:
            for _ in range(count % 2):
                slot, done, turn = _paired(x, ring, slot, done, turn, K, -1, False, S)
    return slot, done, turn


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
        slots = following
        column += COLUMNS
        following = _slots_of(table, column, first, length)
        mbarrier.wait(ring.empty.index(slot[0]), slot[1] ^ 1)
        _throttle(ring, slot, S)
        to = ring.slots.index(slot[0])._reinterpret(gl.bfloat16, [2, 64, 128], KV)
        for i in gl.static_range(4):
            source = gl.convert_layout(slots[i], gl.SliceLayout(1, COPY))[:, None]
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


@gluon.jit
@no_type_check
def multiplier(cache, meta, work, num_slots, ring, S: gl.constexpr):
    """Run the products and the attention of all layers, in eight warps."""
    request, head, split = unit_of(gl.program_id(0), 0, S)
    length = gl.load(meta.key_lens + request)
    slot, done = (0, 0), (0, 0)
    turn = 0
    base = 1
    PAIR: gl.constexpr = 2 * S.programs
    ODD: gl.constexpr = S.qkv_tiles % PAIR != 0 or S.gate_up_tiles % PAIR != 0
    ODD_ROWS: gl.constexpr = S.residual_tiles % PAIR != 0
    qkv, gate_up = own_tiles(S.qkv_tiles, S), own_tiles(S.gate_up_tiles, S)
    residual = own_tiles(S.residual_tiles, S)
    for half in range(2 * S.layers):  # of a layer: attention or MLP, with one copy of their first product's code
        count = gl.where(half % 2 == 0, qkv, gate_up)
        slot, done, turn = product(work.weighted, ring, slot, done, turn, count, S.hidden, ODD, -1, S)
        if half % 2 == 0:
            if split < S.splits:
                for i in range(S.turns):
                    if S.turns > 1:
                        length = gl.load(meta.key_lens + i)
                    slot = attend(meta, work, half // 2, i, length, ring, slot, turn, S)
                    signal(work, base + S.at_attended + head)
                for i in range(S.turns):
                    merge(cache, meta, work, half // 2, i, num_slots, ring, turn + 1, S)
                    signal(work, base + S.at_merged)
            else:
                woken(ring, turn, S)
                woken(ring, turn + 1, S)
            turn += 2
            slot, done, turn = product(work.attended, ring, slot, done, turn, residual, S.attended, ODD_ROWS, -1, S)
        else:
            slot, done, turn = product(work.inner, ring, slot, done, turn, residual, S.inner, ODD_ROWS, S.inner_cut, S)
            base += S.layer_counters


@gluon.jit(do_not_specialize=["num_slots", "columns"])
@no_type_check
def forward(qkv, o, gate_up, down, cache, tables, meta, work, num_slots, columns,
            S: gl.constexpr, REGS: gl.constexpr):  # fmt: skip
    """Run all layers. cache: keys and values, [layers, slots, KV heads, D]. columns: of the table of slots."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    slots = gl.allocate_shared_memory(gl.bfloat16, [S.ring, 16, 16, 64], WEIGHTS)
    sums = gl.allocate_shared_memory(gl.float32, [SUMS, 8, 16, S.width], SHARES)
    full = gl.allocate_shared_memory(gl.int64, [S.ring, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [S.ring, 1], BAR)
    sums_full = gl.allocate_shared_memory(gl.int64, [SUMS, 1], BAR)
    sums_empty = gl.allocate_shared_memory(gl.int64, [SUMS, 1], BAR)
    wakes = gl.allocate_shared_memory(gl.int64, [WAKES, 1], BAR)
    seen = gl.allocate_shared_memory(gl.int64, [WAKES, 1], BAR)
    for i in gl.static_range(S.ring):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SUMS):
        mbarrier.init(sums_full.index(i), count=1)
        mbarrier.init(sums_empty.index(i), count=1)
        mbarrier.init(wakes.index(i), count=1)
        mbarrier.init(seen.index(i), count=3)
    ring = RoleRing(slots, full, empty, sums, sums_full, sums_empty, wakes, seen)
    gl.warp_specialize(
        [
            (multiplier, (cache, meta, work, num_slots, ring, S)),
            (producer, (qkv, o, gate_up, down, cache, meta, num_slots, columns, ring, S)),
            (poller, (work, ring, S)),
            (finisher, (cache, tables, meta, work, num_slots, ring, 0, S)),
            (finisher, (cache, tables, meta, work, num_slots, ring, 1, S)),
        ],
        [1, 1, 1, 1],
        [REGS, REGS, REGS, REGS],
    )
