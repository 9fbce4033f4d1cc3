"""The persistent forward in Gluon, for GPUs of compute capability 9.

Every program is resident and has five roles. The producer (one warp, producer.py) streams weights, then keys and
values, through a ring in shared memory; it waits for free slots and for the copies before the last one. The multiplier
(eight warps) multiplies (products.py) and attends (attention.py). Two finishers (a warp each, finisher.py) take its
sums: scale, rotation, KV write, gate, residual sum, and squares for the next norm. The poller (a warp, poller.py)
awaits the other programs' counters and wakes the other roles.

The order of everything stands in schedule.py, and S is a Schedule. memory.py has what programs and roles share.
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specsim.fast.persistent.attention import attend, merge
from specsim.fast.persistent.finisher import finisher
from specsim.fast.persistent.memory import SHARES, SUMS, WAKES, WEIGHTS, Ring, own_tiles, signal, unit_of
from specsim.fast.persistent.poller import poller, woken
from specsim.fast.persistent.producer import producer
from specsim.fast.persistent.products import product


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
    ring = Ring(slots, full, empty, sums, sums_full, sums_empty, wakes, seen)
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
