"""Poller of the persistent forward: one warp awaits other programs' counters and wakes the other roles."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specsim.fast.persistent.memory import STRIDE, WAKES

PATIENCE = gl.constexpr(1 << 21)  # polls of one counter, each of about a microsecond


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
def poller(work, ring, S: gl.constexpr):
    """Await the dependencies of all layers, in the order in which roles need them."""
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
