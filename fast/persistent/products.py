"""Products of the persistent forward: eight warps multiply tiles of weights by rows, and hand their sums over."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from specsim.fast.persistent.memory import SUMS, next_slot
from specsim.fast.persistent.poller import woken

_EIGHTHS = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])  # a warp takes one eighth of a stage's inputs
MMA = gl.constexpr(_EIGHTHS)
A = gl.constexpr(gl.DotOperandLayout(0, _EIGHTHS, 2))
B = gl.constexpr(gl.DotOperandLayout(1, _EIGHTHS, 2))
STORED = gl.constexpr(gl.DotOperandLayout(1, _EIGHTHS, 8))  # of inputs in the order of _place


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
