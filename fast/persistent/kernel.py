"""The persistent forward in Gluon, for GPUs of compute capability 9.

Every program is resident and has five roles. The producer (one warp) streams weights, then keys and values, through a
ring in shared memory; it waits for free slots and for the copies before the last one. The multiplier (eight warps)
multiplies and attends. Two finishers (a warp each) take its sums: scale, rotation, KV write, gate, residual sum, and
squares for the next norm. The poller (a warp) awaits the other programs' counters and wakes the other roles.

The order of everything stands in schedule.py, and S is a Schedule.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, mma_v2, tma

from specsim.fast.persistent.schedule import Schedule

barrier = getattr(gl, "barrier" if hasattr(gl, "barrier") else "thread_barrier")  # Triton 3.7 renamed it

D = gl.constexpr(128)
SUMS, STRIDE, WAKES, COLUMNS, FLIGHT = (gl.constexpr(size) for size in (4, 8, 4, 64, 2))
PATIENCE = gl.constexpr(1 << 21)  # polls of one counter, each of about a microsecond
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))
_EIGHTHS = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])  # a warp takes one eighth of a stage's inputs
MMA = gl.constexpr(_EIGHTHS)
A = gl.constexpr(gl.DotOperandLayout(0, _EIGHTHS, 2))
B = gl.constexpr(gl.DotOperandLayout(1, _EIGHTHS, 2))
STORED = gl.constexpr(gl.DotOperandLayout(1, _EIGHTHS, 8))  # of inputs in the order of _place
SHARES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_SHARE = gl.BlockedLayout([8, 1, 2], [1, 8, 4], [1, 1, 1], [2, 1, 0])
TILE3 = gl.constexpr(_SHARE)
TILE = gl.constexpr(gl.SliceLayout(0, _SHARE))  # half a tile: 8 outputs of all rows
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
SQUARES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0]))
KV = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 2], [16, 8]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))
MERGE = gl.constexpr(gl.BlockedLayout([16, 1, 1], [1, 1, 32], [1, 2, 4], [2, 1, 0]))
SCALE = gl.constexpr(0.08838834764831845 * 1.4426950408889634)  # of scores, in powers of two


@dataclass(frozen=True)
class Constants:
    """Numbers of a schedule as constants of a compilation."""

    schedule: Schedule

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return gl.constexpr(getattr(self.schedule, name))


class Tables(NamedTuple):
    """Weights that are no products."""

    embedding: Any  # [V, H]
    input_norms: Any  # [layers + 1, H], the final norm last
    inner_norms: Any  # [layers, H], before the MLP
    query_norms: Any  # [layers, D], used with head norms only
    key_norms: Any


class Meta(NamedTuple):
    """Tensors of the forward's rows, as in AttentionMetadata."""

    ids: Any
    positions: Any
    slots: Any
    prefix_lens: Any
    visible: Any
    key_lens: Any
    table: Any
    table_rows: Any
    turns: Any  # [R, 2, D/2]
    windows: Any  # i32 [layers], used where there are any


class Work(NamedTuple):
    """Memory that programs share within one forward."""

    residual: Any  # [R, H]
    weighted: Any  # [R, H], residual rows times the next norm's weight
    squares: Any  # f32 [R, H / 16]
    query: Any  # [R, A D]
    key: Any  # [R, KV heads D], used with head norms only, like the next
    head_squares: Any  # f32 [R, heads and KV heads, 8]
    attended: Any  # [R, A D]
    inner: Any  # [R, I]
    parts: Any  # f32 [units, splits, pairs, D]
    stats: Any  # f32 [units, splits, pairs, 2]: largest score and sum of exponentials
    features: Any  # [R, features H]
    counters: Any  # i32
    error: Any  # i32 in the host's memory: set where a counter was awaited in vain


class Ring(NamedTuple):
    """Slots in shared memory, each with barriers. A cursor is a slot's number and the parity of its use."""

    slots: Any
    full: Any
    empty: Any
    sums: Any
    sums_full: Any
    sums_empty: Any
    wakes: Any
    seen: Any  # used in a sparse schedule only


@gluon.jit
@no_type_check
def _next(cursor, SLOTS: gl.constexpr):
    last = cursor[0] == SLOTS - 1
    return gl.where(last, 0, cursor[0] + 1), gl.where(last, cursor[1] ^ 1, cursor[1])


@gluon.jit
@no_type_check
def _count(TILES: gl.constexpr, S: gl.constexpr):
    """Count the tiles of this program."""
    return (TILES - gl.program_id(0) + S.programs - 1) // S.programs


@gluon.jit
@no_type_check
def _here(x):
    """Return x so that the compiler does not move what is computed from it out of the loop over layers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
@no_type_check
def _rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
@no_type_check
def _place(k):
    """Compute where input k of a product is stored.

    Of 32 successive inputs, a lane multiplies four pairs that are eight apart. They are stored one after the other, so
    that the lane loads them at once.
    """
    return (k & -32) + (k >> 1 & 3) * 8 + (k >> 3 & 3) * 2 + (k & 1)


@gluon.jit
@no_type_check
def _signal(work, at):
    barrier()
    gl.atomic_add(work.counters + at * STRIDE, 1, sem="release", scope="gpu")


@gluon.jit
@no_type_check
def _unit(me, i, S: gl.constexpr):
    rest = me // S.kv_heads
    request = i if S.batch_invariant else rest % S.requests
    split = rest if S.batch_invariant else rest // S.requests
    return request, me % S.kv_heads, split


@gluon.jit
@no_type_check
def _span(meta, layer, length, split, S: gl.constexpr):
    """Compute the first visible column, and the stages of a part of a request's keys."""
    first = 0
    if S.has_windows:
        first = gl.maximum(0, length + 1 - gl.load(meta.windows + layer))
    stages = (length - first + COLUMNS - 1) // COLUMNS
    return first, split * stages // S.splits, (split + 1) * stages // S.splits


# The producer.


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
    count = _count(TILES, S)
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
            slot = _next(slot, S.ring)
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
    first, low, high = _span(meta, layer, length, split, S)
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
        slot = _next(slot, S.ring)
    return slot


@gluon.jit
@no_type_check
def _producer(qkv, o, gate_up, down, cache, meta, num_slots, columns, ring, S: gl.constexpr):
    request, head, split = _unit(gl.program_id(0), 0, S)
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


# The poller.


@gluon.jit
@no_type_check
def _read(p, PAUSE: gl.constexpr):
    wait: gl.constexpr = "nanosleep.u32 100; " if PAUSE else ""
    return gl.inline_asm_elementwise(
        wait + "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [p.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def _await(work, at, EXPECTED: gl.constexpr, ring, turn, left, S: gl.constexpr):
    """Wait until a counter has its value or no patience is left, and wake the other roles."""
    p = work.counters + at * STRIDE
    count = _read(p, False)
    while (count < EXPECTED) & (left > 0):
        count = _read(p, True)
        left -= 1
        if left == 0:
            gl.store(work.error, 1)
    if S.is_sparse:
        mbarrier.wait(ring.seen.index(turn % WAKES), ((turn // WAKES) & 1) ^ 1)
    mbarrier.arrive(ring.wakes.index(turn % WAKES), count=1)
    return turn + 1, gl.where(left > 0, PATIENCE, 0)


@gluon.jit
@no_type_check
def _poller(work, ring, S: gl.constexpr):
    head = gl.program_id(0) % S.kv_heads
    turn = 0
    left = PATIENCE + 0
    at = 1
    for _ in range(S.layers):
        turn, left = _await(work, at - 1, S.residual_tiles, ring, turn, left, S)
        turn, left = _await(work, at + head, S.query_tiles, ring, turn, left, S)
        turn, left = _await(work, at + S.at_attended + head, S.head_expected, ring, turn, left, S)
        turn, left = _await(work, at + S.at_merged, S.parts, ring, turn, left, S)
        turn, left = _await(work, at + S.at_o, S.residual_tiles, ring, turn, left, S)
        turn, left = _await(work, at + S.at_inner, S.first_inner_tiles, ring, turn, left, S)
        turn, left = _await(work, at + S.at_inner + 1, S.gate_up_tiles - S.first_inner_tiles, ring, turn, left, S)
        at += S.layer_counters


@gluon.jit
@no_type_check
def _woken(ring, turn, S: gl.constexpr, pred=True):
    """Wait for the next dependency, if `pred`."""
    mbarrier.wait(ring.wakes.index(turn % WAKES), (turn // WAKES) & 1, pred=pred)
    if S.is_sparse:
        mbarrier.arrive(ring.seen.index(turn % WAKES), count=1, pred=pred)
    return turn + 1


@gluon.jit
@no_type_check
def _skipped(ring, turn, COUNT: gl.constexpr, S: gl.constexpr):
    """Pass dependencies that a role does not need; in a sparse schedule its poller counts on it all the same."""
    if S.is_sparse:
        for _ in gl.static_range(COUNT):
            turn = _woken(ring, turn, S)
    else:
        turn += COUNT
    return turn


# The multiplier.


@gluon.jit
@no_type_check
def _inputs(x, K: gl.constexpr, k, S: gl.constexpr):
    """Load 512 inputs of every row; zeros past the last."""
    part = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, STORED)))[:, None, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, STORED)))[None, :, None]
    n = gl.arange(0, S.width, layout=gl.SliceLayout(0, gl.SliceLayout(1, STORED)))[None, None, :]
    place = part * 64 + place + k * 512
    mask = (place >= 0) & (n < S.rows) & (k < (K + 511) // 512)
    if K % 512 != 0:
        mask = mask & (place < K)
    stored = gl.load(x + place + n * K, mask=mask, other=0.0, cache_modifier=".cg")
    stored = stored.reshape([8, 2, 4, 4, 2, S.width]).permute((0, 1, 3, 2, 4, 5)).reshape([8, 64, S.width])
    return gl.convert_layout(stored, B, assert_trivial=True)


@gluon.jit
@no_type_check
def _consume(ring, slot, low_sum, high_sum, x, S: gl.constexpr):
    mbarrier.wait(ring.full.index(slot[0]), slot[1])
    w = ring.slots.index(slot[0])
    low, high = w.slice(0, 8).load(A), w.slice(8, 8).load(A)
    mbarrier.arrive(ring.empty.index(slot[0]), count=1)
    return _next(slot, S.ring), mma_v2(low, x[0], low_sum), mma_v2(high, x[1], high_sum)


@gluon.jit
@no_type_check
def _hand_over(ring, done, value):
    mbarrier.wait(ring.sums_empty.index(done[0]), done[1] ^ 1)
    ring.sums.index(done[0]).store(value)
    mbarrier.arrive(ring.sums_full.index(done[0]), count=1)
    return _next(done, SUMS)


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
            _woken(ring, turn, S, k + AHEAD == CUT)
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
def _product(x, ring, slot, done, turn, count, K: gl.constexpr, ODD: gl.constexpr, CUT: gl.constexpr, S: gl.constexpr):
    """Multiply `count` tiles of this program, after their dependency. ODD: whether that may be an odd number.

    CUT: the first stage whose inputs have a second dependency; 0 if it is the first, -1 if there is none.
    """
    FIRST: gl.constexpr = 1 if CUT > 0 else 0
    turn = _woken(ring, turn, S)
    if CUT == 0:
        turn = _woken(ring, turn, S)
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
def _head_scale(work, row, head, mask, S: gl.constexpr):
    """Compute the scale of a head's norm from the squares of its tiles; head counts queries, then keys."""
    at = work.head_squares + (row * (S.heads + S.kv_heads) + head) * 8
    total = gl.load(at, mask, 0.0, cache_modifier=".cg")
    for tile in gl.static_range(1, 8):
        total += gl.load(at + tile, mask, 0.0, cache_modifier=".cg")
    return gl.rsqrt(total / D + S.eps)


@gluon.jit
@no_type_check
def _queries(work, request, head, S: gl.constexpr):
    """Load the queries of a unit, [D, pairs], and scale them where there are head norms."""
    Q: gl.constexpr = gl.DotOperandLayout(1, SCORES, 8)  # in the order of _place
    pair = gl.arange(0, S.pairs, layout=gl.SliceLayout(0, Q))[None, :]
    dim = gl.arange(0, 128, layout=gl.SliceLayout(1, Q))[:, None]
    row, own_head = request * S.nodes + pair // S.group, head * S.group + pair % S.group
    is_row = pair < S.nodes * S.group
    query = gl.load(work.query + (row * S.heads + own_head) * D + dim, is_row & (dim >= 0), 0.0, cache_modifier=".cg")
    if S.has_head_norms:
        query = (query.to(gl.float32) * _head_scale(work, row, own_head, is_row, S)).to(gl.bfloat16)
    query = query.reshape([4, 4, 4, 2, S.pairs]).permute((0, 2, 1, 3, 4)).reshape([128, S.pairs])
    return gl.convert_layout(query, gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)


@gluon.jit
@no_type_check
def _scores(kv, query, stage, first, prefix, lowest, S: gl.constexpr):
    """Compute the scores of a stage's keys, [64, pairs], in powers of two."""
    s = mma_v2(kv.index(0).load(gl.DotOperandLayout(0, SCORES, 2)), query, gl.zeros([64, S.pairs], gl.float32, SCORES))
    column = first + stage * COLUMNS + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))[:, None]
    ok = column < prefix[None, :]
    if S.has_windows:
        ok = ok & (column > lowest[None, :])
    return gl.where(ok, s * SCALE, float("-inf"))


@gluon.jit
@no_type_check
def _weighted_values(kv, weight, acc):
    v = kv.index(1).permute((1, 0)).load(gl.DotOperandLayout(0, VALUES, 2))
    return mma_v2(v, gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(1, VALUES, 2)), acc)


@gluon.jit
@no_type_check
def _attend(meta, work, layer, i, length, ring, slot, turn, S: gl.constexpr):
    """Attend from the rows of this program's i-th unit to its part of the prefix, two stages at a time.

    The softmax is an online one.
    """
    request, head, split = _unit(_here(gl.program_id(0)), i, S)
    pair = gl.arange(0, S.pairs, layout=gl.SliceLayout(0, SCORES))
    row = request * S.nodes + pair // S.group
    is_row = pair < S.nodes * S.group
    # What other programs do not write is loaded before their signal comes.
    prefix = gl.load(meta.prefix_lens + row, is_row, 0)
    lowest = prefix
    if S.has_windows:
        lowest = gl.load(meta.positions + row, is_row, 0).to(gl.int32) - gl.load(meta.windows + layer)
    first, low, high = _span(meta, layer, length, split, S)
    _woken(ring, turn, S, i == 0)
    query = _queries(work, request, head, S)
    top = gl.full([S.pairs], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
    total = gl.zeros([64, S.pairs], gl.float32, SCORES)
    acc = gl.zeros([128, S.pairs], gl.float32, VALUES)
    for stage in range(low, high, 2):
        mbarrier.wait(ring.full.index(slot[0]), slot[1])
        kv = ring.slots.index(slot[0])._reinterpret(gl.bfloat16, [2, 64, 128], KV)
        a = _scores(kv, query, stage, first, prefix, lowest, S)
        other = _next(slot, S.ring)
        is_two = stage + 1 < high
        if is_two:
            mbarrier.wait(ring.full.index(other[0]), other[1])
            kv_b = ring.slots.index(other[0])._reinterpret(gl.bfloat16, [2, 64, 128], KV)
            b = _scores(kv_b, query, stage + 1, first, prefix, lowest, S)
        else:
            b = gl.full([64, S.pairs], float("-inf"), gl.float32, SCORES)
        higher = gl.maximum(top, gl.max(gl.maximum(a, b), axis=0))
        shift = gl.where(higher == float("-inf"), 0.0, higher)
        before = gl.exp2(top - shift)
        a, b = gl.exp2(a - shift[None, :]), gl.exp2(b - shift[None, :])
        total = total * before[None, :] + a + b
        top = higher
        acc = acc * gl.convert_layout(before, gl.SliceLayout(0, VALUES))[None, :]
        acc = _weighted_values(kv, a, acc)
        if is_two:
            kv_b = ring.slots.index(other[0])._reinterpret(gl.bfloat16, [2, 64, 128], KV)
            acc = _weighted_values(kv_b, b, acc)
        fence_async_shared()
        mbarrier.arrive(ring.empty.index(slot[0]), count=1)
        slot = other
        if is_two:
            mbarrier.arrive(ring.empty.index(slot[0]), count=1)
            slot = _next(slot, S.ring)
    at = ((request * S.kv_heads + head) * S.splits + split) * S.pairs
    gl.store(work.stats + (at + pair) * 2, top)
    gl.store(work.stats + (at + pair) * 2 + 1, gl.sum(total, axis=0))
    pair = gl.arange(0, S.pairs, layout=gl.SliceLayout(0, VALUES))[None, :]
    dim = gl.arange(0, 128, layout=gl.SliceLayout(1, VALUES))[:, None]
    gl.store(work.parts + (at + pair) * D + dim, acc)
    return slot


@gluon.jit
@no_type_check
def _attend_own(cache, meta, work, layer, num_slots, request, head, pair, value_dim, own, S: gl.constexpr):
    """Attend from some pairs to the rows' own keys: (largest score, sum, weighted values).

    Keys under a head norm are scaled and written here.
    """
    dim = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, MERGE)))[None, None, :]
    node = gl.arange(0, S.own, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGE)))[:, None, None]
    row, own_row = request * S.nodes + pair // S.group, request * S.nodes + node
    mask = (pair < S.nodes * S.group) & (dim >= 0)
    mask_own = (own >= 0) & (dim >= 0)
    from_query = work.query + (row * S.heads + head * S.group + pair % S.group) * D
    at = ((layer * num_slots + own) * S.kv_heads + head) * D
    query = gl.load(from_query + _place(dim), mask, 0.0, cache_modifier=".cg").to(gl.float32)
    if S.has_head_norms:
        raw = work.key + (own_row * S.kv_heads + head) * D + dim
        key = gl.load(raw, mask_own, 0.0, cache_modifier=".cg").to(gl.float32)
        key = (key * _head_scale(work, own_row, S.heads + head, own >= 0, S)).to(gl.bfloat16)
        gl.store(cache[0] + at + dim, key, mask_own)
        is_pair = pair < S.nodes * S.group
        query = _rounded(query * _head_scale(work, row, head * S.group + pair % S.group, is_pair, S))
    else:
        key = gl.load(cache[0] + at + dim, mask_own, 0.0, cache_modifier=".cg")
    value = gl.load(cache[1] + at + value_dim, (own >= 0) & (value_dim >= 0), 0.0, cache_modifier=".cg")
    s = gl.expand_dims(gl.sum(query * key.to(gl.float32), axis=2), 2) * SCALE  # [own, pairs, 1]
    seen = gl.load(meta.visible + row, pair < S.nodes * S.group, 0)
    s = gl.where(((seen >> node) & 1) == 1, s, float("-inf"))
    top = gl.max(s, axis=0)
    weight = gl.exp2(s - gl.where(top == float("-inf"), 0.0, top)[None, :, :])
    return top, gl.sum(weight, axis=0), gl.sum(weight * value.to(gl.float32), axis=0)


@gluon.jit
@no_type_check
def _merge(cache, meta, work, layer, i, num_slots, ring, turn, S: gl.constexpr):
    """Merge some numbers of the parts of this program's i-th unit, in order, with those of the rows' own keys."""
    request, head, split = _unit(_here(gl.program_id(0)), i, S)
    first = split * S.merged
    PAIRS: gl.constexpr = (S.merged + 127) // 128
    pair = first // D + gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(2, MERGE)))[None, :, None]
    dim = first % D + gl.arange(0, S.merged // PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MERGE)))[None, None, :]
    part = gl.arange(0, S.splits, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGE)))[:, None, None]
    node = gl.arange(0, S.own, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGE)))[:, None, None]
    own = gl.load(meta.slots + request * S.nodes + node, node < S.nodes, -1)
    _woken(ring, turn, S, i == 0)
    source = ((request * S.kv_heads + head) * S.splits + part) * S.pairs + pair  # [splits, pairs, 1]
    top = gl.load(work.stats + source * 2, cache_modifier=".cg")
    total = gl.load(work.stats + source * 2 + 1, cache_modifier=".cg")
    acc = gl.load(work.parts + source * D + dim, cache_modifier=".cg")  # [splits, pairs, D]
    own_top, own_total, own_acc = _attend_own(cache, meta, work, layer, num_slots, request, head, pair, dim, own, S)
    highest = gl.maximum(gl.max(top, axis=0), own_top)
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    weight = gl.exp2(top - shift[None, :, :])
    own_weight = gl.exp2(own_top - shift)
    whole = gl.sum(weight * total, axis=0) + own_weight * own_total
    out = (gl.sum(weight * acc, axis=0) + own_weight * own_acc) / gl.where(whole > 0, whole, 1.0)  # [pairs, D]
    pair = first // D + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, gl.SliceLayout(0, MERGE)))[:, None]
    dim = first % D + gl.arange(0, S.merged // PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(0, MERGE)))[None, :]
    row = request * S.nodes + pair // S.group
    to = work.attended + (row * S.heads + head * S.group + pair % S.group) * D + _place(dim)
    gl.store(to, out.to(gl.bfloat16), (pair < S.nodes * S.group) & (dim >= 0))


@gluon.jit
@no_type_check
def _multiplier(cache, meta, work, num_slots, ring, S: gl.constexpr):
    request, head, split = _unit(gl.program_id(0), 0, S)
    length = gl.load(meta.key_lens + request)
    slot, done = (0, 0), (0, 0)
    turn = 0
    base = 1
    PAIR: gl.constexpr = 2 * S.programs
    ODD: gl.constexpr = S.qkv_tiles % PAIR != 0 or S.gate_up_tiles % PAIR != 0
    ODD_ROWS: gl.constexpr = S.residual_tiles % PAIR != 0
    qkv, gate_up, residual = _count(S.qkv_tiles, S), _count(S.gate_up_tiles, S), _count(S.residual_tiles, S)
    for half in range(2 * S.layers):  # of a layer: attention or MLP, with one copy of their first product's code
        count = gl.where(half % 2 == 0, qkv, gate_up)
        slot, done, turn = _product(work.weighted, ring, slot, done, turn, count, S.hidden, ODD, -1, S)
        if half % 2 == 0:
            if split < S.splits:
                for i in range(S.turns):
                    if S.turns > 1:
                        length = gl.load(meta.key_lens + i)
                    slot = _attend(meta, work, half // 2, i, length, ring, slot, turn, S)
                    _signal(work, base + S.at_attended + head)
                for i in range(S.turns):
                    _merge(cache, meta, work, half // 2, i, num_slots, ring, turn + 1, S)
                    _signal(work, base + S.at_merged)
            else:
                _woken(ring, turn, S)
                _woken(ring, turn + 1, S)
            turn += 2
            slot, done, turn = _product(work.attended, ring, slot, done, turn, residual, S.attended, ODD_ROWS, -1, S)
        else:
            slot, done, turn = _product(work.inner, ring, slot, done, turn, residual, S.inner, ODD_ROWS, S.inner_cut, S)
            base += S.layer_counters


# The finishers. Each takes every other tile of a product.


@gluon.jit
@no_type_check
def _tile(i, S: gl.constexpr):
    """Number of this program's i-th tile, and places, rows and mask of half a tile."""
    o = gl.arange(0, 8, layout=gl.SliceLayout(1, TILE))[:, None]
    n = gl.arange(0, S.width, layout=gl.SliceLayout(0, TILE))[None, :]
    return _here(gl.program_id(0)) + S.programs * i, o, n, (n < S.rows) & (o >= 0)


@gluon.jit
@no_type_check
def _summed(ring, done):
    mbarrier.wait(ring.sums_full.index(done[0]), done[1])
    s = ring.sums.index(done[0])
    low, high = gl.sum(s.slice(0, 8, dim=1).load(TILE3), axis=0), gl.sum(s.slice(8, 8, dim=1).load(TILE3), axis=0)
    mbarrier.arrive(ring.sums_empty.index(done[0]), count=1)
    return low, high


@gluon.jit
@no_type_check
def _scale(work, S: gl.constexpr):
    """Compute the scale of each row's norm, [1, rows], from the squares of all tiles."""
    n = gl.arange(0, S.width, layout=gl.SliceLayout(1, SQUARES))[:, None]
    tile = gl.arange(0, 128, layout=gl.SliceLayout(0, SQUARES))[None, :]
    total = gl.zeros([S.width, 128], gl.float32, SQUARES)
    for i in gl.static_range((S.residual_tiles + 127) // 128):
        mask = (n < S.rows) & (tile + i * 128 < S.residual_tiles)
        total += gl.load(work.squares + n * S.residual_tiles + tile + i * 128, mask, 0.0, cache_modifier=".cg")
    scale = gl.rsqrt(gl.sum(total, axis=1) / S.hidden + S.eps)
    return gl.convert_layout(scale, gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
@no_type_check
def _store_rows(work, tile, at, mask, low, high, low_norm, high_norm, n, layer, S: gl.constexpr):
    """Store a tile of residual rows, what the next norm needs, and features where a layer's input is one.

    low, high: bf16. layer: the one whose input it is.
    """
    COUNT: gl.constexpr = len(S.features)
    gl.store(work.residual + at, low, mask)
    gl.store(work.residual + at + 8, high, mask)
    for i in gl.static_range(COUNT):
        if layer == S.features[i]:
            to = work.features + n * ((COUNT - 1) * S.hidden) + i * S.hidden + at
            gl.store(to, low, mask)
            gl.store(to + 8, high, mask)
    low, high = low.to(gl.float32), high.to(gl.float32)
    place = work.weighted + _place(at)
    gl.store(place, (low * low_norm.to(gl.float32)).to(gl.bfloat16), mask)
    gl.store(place + 2, (high * high_norm.to(gl.float32)).to(gl.bfloat16), mask)
    row = gl.arange(0, S.width, layout=gl.SliceLayout(0, TILE))
    gl.store(work.squares + row * S.residual_tiles + tile, gl.sum(low * low + high * high, axis=0), row < S.rows)


@gluon.jit
@no_type_check
def _finish_rows(work, norm, ring, done, counter, layer, SIDE: gl.constexpr, S: gl.constexpr):
    """Add tiles to the residual rows."""
    for i in range(_count(S.residual_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            at = n * S.hidden + tile * 16 + o
            low_norm, high_norm = gl.load(norm + tile * 16 + o), gl.load(norm + tile * 16 + o + 8)
            low_before = gl.load(work.residual + at, mask, 0.0, cache_modifier=".cg")
            high_before = gl.load(work.residual + at + 8, mask, 0.0, cache_modifier=".cg")
            low, high = _summed(ring, done)
            low, high = low_before + low.to(gl.bfloat16), high_before + high.to(gl.bfloat16)
            _store_rows(work, tile, at, mask, low, high, low_norm, high_norm, n, layer, S)
            _signal(work, counter)
        done = _next(done, SUMS)
    return done


@gluon.jit
@no_type_check
def _embed(tables, meta, work, SIDE: gl.constexpr, S: gl.constexpr):
    for i in range(_count(S.residual_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            source = tables.embedding + gl.load(meta.ids + n, n < S.rows, 0) * S.hidden + tile * 16 + o
            norm = tables.input_norms + tile * 16 + o
            low, high, low_norm, high_norm = gl.load(source), gl.load(source + 8), gl.load(norm), gl.load(norm + 8)
            at = n * S.hidden + tile * 16 + o
            _store_rows(work, tile, at, mask, low, high, low_norm, high_norm, n, 0, S)
            _signal(work, 0)


@gluon.jit
@no_type_check
def _finish_qkv(
    cache, tables, meta, work, layer, num_slots, ring, done, turn, base, SIDE: gl.constexpr, S: gl.constexpr
):
    """Scale and rotate queries and keys, and write queries, keys and values.

    A head norm's weights are applied here, before the rotation, which keeps a head's scale. That needs the squares of
    all its tiles, so attention applies it.
    """
    turn = _woken(ring, turn, S)
    scale = _scale(work, S)
    for i in range(_count(S.qkv_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            head, dim = tile // 8, tile % 8 * 8 + o
            own = gl.load(meta.slots + n, n < S.rows, -1)
            co = gl.load(meta.turns + n * 128 + dim, mask, 0.0).to(gl.float32)
            si = gl.load(meta.turns + n * 128 + 64 + dim, mask, 0.0).to(gl.float32)
            if S.has_head_norms:
                norm = (tables.query_norms if head < S.heads else tables.key_norms) + layer * D + dim
                low_norm, high_norm = gl.load(norm).to(gl.float32), gl.load(norm + 64).to(gl.float32)
            low, high = _summed(ring, done)
            x, y = _rounded(low * scale), _rounded(high * scale)
            if head < S.heads + S.kv_heads:
                if S.has_head_norms:
                    at = work.head_squares + (n * (S.heads + S.kv_heads) + head) * 8 + tile % 8
                    gl.store(at, gl.expand_dims(gl.sum(x * x + y * y, axis=0), 0), n < S.rows)
                    x, y = x * low_norm, y * high_norm
                    x, y = x * co - y * si, y * co + x * si
                else:
                    x, y = _rounded(x * co) - _rounded(y * si), _rounded(y * co) + _rounded(x * si)
            x, y = x.to(gl.bfloat16), y.to(gl.bfloat16)
            if head < S.heads:
                to = work.query + (n * S.heads + head) * 128 + _place(dim)
                gl.store(to, x, mask)
                gl.store(to + 64, y, mask)
                _signal(work, base + head // S.group)
            else:
                kv_head = (head - S.heads) % S.kv_heads
                place = ((layer * num_slots + own) * S.kv_heads + kv_head) * 128 + dim
                kept = mask & (own >= 0)
                if head >= S.heads + S.kv_heads:
                    gl.store(cache[1] + place, x, kept)
                    gl.store(cache[1] + place + 64, y, kept)
                elif S.has_head_norms:
                    raw = work.key + (n * S.kv_heads + kv_head) * 128 + dim
                    gl.store(raw, x, mask)
                    gl.store(raw + 64, y, mask)
                else:
                    gl.store(cache[0] + place, x, kept)
                    gl.store(cache[0] + place + 64, y, kept)
                _signal(work, base + S.at_attended + kv_head)
        done = _next(done, SUMS)
    return done, turn


@gluon.jit
@no_type_check
def _finish_gated(work, ring, done, turn, counter, SIDE: gl.constexpr, S: gl.constexpr):
    turn = _woken(ring, turn, S)
    scale = _scale(work, S)
    for i in range(_count(S.gate_up_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            low, high = _summed(ring, done)
            gate, up = _rounded(low * scale), _rounded(high * scale)
            shrunk = gl.exp(-gl.abs(gate))
            silu = _rounded(gate * gl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk))
            gl.store(work.inner + _place(n * S.inner + tile * 8 + o), (silu * up).to(gl.bfloat16), mask)
            _signal(work, counter + (tile >= S.first_inner_tiles).to(gl.int32))
        done = _next(done, SUMS)
    return done, turn


@gluon.jit
@no_type_check
def _finisher(cache, tables, meta, work, num_slots, ring, SIDE: gl.constexpr, S: gl.constexpr):
    done = (0, 0)
    turn = 0
    base = 1
    _embed(tables, meta, work, SIDE, S)
    for half in range(2 * S.layers):  # of a layer; both add to the residual rows at the end, with one copy of the code
        layer = half // 2
        if half % 2 == 0:
            done, turn = _finish_qkv(cache, tables, meta, work, layer, num_slots, ring, done, turn, base, SIDE, S)
            turn = _skipped(ring, turn, 3, S)
            norm, counter, following = tables.inner_norms + layer * S.hidden, base + S.at_o, -1
        else:
            done, turn = _finish_gated(work, ring, done, turn, base + S.at_inner, SIDE, S)
            turn = _skipped(ring, turn, 2, S)
            norm, counter, following = tables.input_norms + (layer + 1) * S.hidden, base + S.at_down, layer + 1
        done = _finish_rows(work, norm, ring, done, counter, following, SIDE, S)
        base += half % 2 * S.layer_counters


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
    ring = Ring(slots, full, empty, sums, sums_full, sums_empty, wakes, seen)
    gl.warp_specialize(
        [
            (_multiplier, (cache, meta, work, num_slots, ring, S)),
            (_producer, (qkv, o, gate_up, down, cache, meta, num_slots, columns, ring, S)),
            (_poller, (work, ring, S)),
            (_finisher, (cache, tables, meta, work, num_slots, ring, 0, S)),
            (_finisher, (cache, tables, meta, work, num_slots, ring, 1, S)),
        ],
        [1, 1, 1, 1],
        [REGS, REGS, REGS, REGS],
    )
