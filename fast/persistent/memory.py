"""Memory of the persistent forward: tensors that programs share, slots that a program's roles share, and signals."""

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specsim.fast.runtime.gluon import barrier

D = gl.constexpr(128)
SUMS, STRIDE, WAKES, COLUMNS, FLIGHT = (gl.constexpr(size) for size in (4, 8, 4, 64, 2))
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))
KV = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SHARES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


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
