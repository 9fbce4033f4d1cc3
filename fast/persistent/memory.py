"""Memory of the persistent forward: tensors that programs share, slots that a program's roles share, and signals.

The poller, one warp, awaits other programs' counters and wakes the other roles.
"""

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specsim.fast.runtime.gluon import barrier

D = gl.constexpr(128)
SUMS, STRIDE, WAKES, COLUMNS, FLIGHT = (gl.constexpr(size) for size in (4, 8, 4, 64, 2))
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))
KV = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SHARES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
PATIENCE = gl.constexpr(1 << 21)  # polls of one counter, each of about a microsecond


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
    cos_sin: Any  # [R, 2, D/2]
    windows: Any  # i32 [layers], used where there are any


class ForwardMemory(NamedTuple):
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


class RoleRing(NamedTuple):
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
def next_slot(cursor, SLOTS: gl.constexpr):
    """Move a cursor to the next of SLOTS slots."""
    last = cursor[0] == SLOTS - 1
    return gl.where(last, 0, cursor[0] + 1), gl.where(last, cursor[1] ^ 1, cursor[1])


@gluon.jit
@no_type_check
def signal(work, at):
    """Count up a counter that other programs await, after all lanes of this role have stored."""
    barrier()
    gl.atomic_add(work.counters + at * STRIDE, 1, sem="release", scope="gpu")


@gluon.jit
@no_type_check
def own_tiles(TILES: gl.constexpr, S: gl.constexpr):
    """Count the tiles of this program."""
    return (TILES - gl.program_id(0) + S.programs - 1) // S.programs


@gluon.jit
@no_type_check
def unit_of(me, i, S: gl.constexpr):
    """Compute the request, the KV head and the part of the prefix of a program's i-th unit."""
    rest = me // S.kv_heads
    request = i if S.batch_invariant else rest % S.requests
    split = rest if S.batch_invariant else rest // S.requests
    return request, me % S.kv_heads, split


@gluon.jit
@no_type_check
def span_of(meta, layer, length, split, S: gl.constexpr):
    """Compute the first visible column, and the stages of a part of a request's keys."""
    first = 0
    if S.has_windows:
        first = gl.maximum(0, length + 1 - gl.load(meta.windows + layer))
    stages = (length - first + COLUMNS - 1) // COLUMNS
    return first, split * stages // S.splits, (split + 1) * stages // S.splits


@gluon.jit
@no_type_check
def place_of(k):
    """Compute where input k of a product is stored.

    Of 32 successive inputs, a lane multiplies four pairs that are eight apart. They are stored one after the other, so
    that the lane loads them at once.
    """
    return (k & -32) + (k >> 1 & 3) * 8 + (k >> 3 & 3) * 2 + (k & 1)


@gluon.jit
@no_type_check
def rounded(x):
    """Round to bfloat16 as a kernel of its own would, and continue in f32."""
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
@no_type_check
def here(x):
    """Return x so that the compiler does not move what is computed from it out of the loop over layers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
@no_type_check
def _read(p, PAUSE: gl.constexpr):
    wait: gl.constexpr = "nanosleep.u32 100; " if PAUSE else ""
    return gl.inline_asm_elementwise(
        wait + "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [p.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def _await(work, at, EXPECTED: gl.constexpr, ring, turn, polls_left, S: gl.constexpr):
    """Wait until a counter has its value or no patience is left, and wake the other roles."""
    p = work.counters + at * STRIDE
    count = _read(p, False)
    while (count < EXPECTED) & (polls_left > 0):
        count = _read(p, True)
        polls_left -= 1
        if polls_left == 0:
            gl.store(work.error, 1)
    if S.is_sparse:
        mbarrier.wait(ring.seen.index(turn % WAKES), ((turn // WAKES) & 1) ^ 1)
    mbarrier.arrive(ring.wakes.index(turn % WAKES), count=1)
    return turn + 1, gl.where(polls_left > 0, PATIENCE, 0)


@gluon.jit
@no_type_check
def poller(work, ring, S: gl.constexpr):
    """Await the dependencies of all layers, in the order in which roles need them."""
    head = gl.program_id(0) % S.kv_heads
    turn = 0
    polls_left = PATIENCE + 0
    at = 1
    for _ in range(S.layers):
        turn, polls_left = _await(work, at - 1, S.residual_tiles, ring, turn, polls_left, S)
        turn, polls_left = _await(work, at + head, S.query_tiles, ring, turn, polls_left, S)
        turn, polls_left = _await(work, at + S.at_attended + head, S.head_expected, ring, turn, polls_left, S)
        turn, polls_left = _await(work, at + S.at_merged, S.parts, ring, turn, polls_left, S)
        turn, polls_left = _await(work, at + S.at_o, S.residual_tiles, ring, turn, polls_left, S)
        turn, polls_left = _await(work, at + S.at_inner, S.first_inner_tiles, ring, turn, polls_left, S)
        turn, polls_left = _await(
            work, at + S.at_inner + 1, S.gate_up_tiles - S.first_inner_tiles, ring, turn, polls_left, S
        )
        at += S.layer_counters


@gluon.jit
@no_type_check
def woken(ring, turn, S: gl.constexpr, pred=True):
    """Wait for the next dependency, if `pred`."""
    mbarrier.wait(ring.wakes.index(turn % WAKES), (turn // WAKES) & 1, pred=pred)
    if S.is_sparse:
        mbarrier.arrive(ring.seen.index(turn % WAKES), count=1, pred=pred)
    return turn + 1


@gluon.jit
@no_type_check
def skipped(ring, turn, COUNT: gl.constexpr, S: gl.constexpr):
    """Pass dependencies that a role does not need; in a sparse schedule its poller counts on it all the same."""
    if S.is_sparse:
        for _ in gl.static_range(COUNT):
            turn = woken(ring, turn, S)
    else:
        turn += COUNT
    return turn
