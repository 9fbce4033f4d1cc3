"""Attention of the persistent forward: parts of the prefix, and their merge with the rows' own keys."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from specsim.fast.persistent.memory import COLUMNS, KV, D, here, next_slot, place_of, rounded, span_of, unit_of, woken

SCORES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 2], [16, 8]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))
MERGE = gl.constexpr(gl.BlockedLayout([16, 1, 1], [1, 1, 32], [1, 2, 4], [2, 1, 0]))
SCALE = gl.constexpr(0.08838834764831845 * 1.4426950408889634)  # of scores, in powers of two


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
    Q: gl.constexpr = gl.DotOperandLayout(1, SCORES, 8)  # in the order of place_of
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
def attend(meta, work, layer, i, length, ring, slot, turn, S: gl.constexpr):
    """Attend from the rows of this program's i-th unit to its part of the prefix, two stages at a time.

    The softmax is an online one.
    """
    request, head, split = unit_of(here(gl.program_id(0)), i, S)
    pair = gl.arange(0, S.pairs, layout=gl.SliceLayout(0, SCORES))
    row = request * S.nodes + pair // S.group
    is_row = pair < S.nodes * S.group
    # What other programs do not write is loaded before their signal comes.
    prefix = gl.load(meta.prefix_lens + row, is_row, 0)
    lowest = prefix
    if S.has_windows:
        lowest = gl.load(meta.positions + row, is_row, 0).to(gl.int32) - gl.load(meta.windows + layer)
    first, low, high = span_of(meta, layer, length, split, S)
    woken(ring, turn, S, i == 0)
    query = _queries(work, request, head, S)
    top = gl.full([S.pairs], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
    total = gl.zeros([64, S.pairs], gl.float32, SCORES)
    acc = gl.zeros([128, S.pairs], gl.float32, VALUES)
    for stage in range(low, high, 2):
        mbarrier.wait(ring.full.index(slot[0]), slot[1])
        kv = ring.slots.index(slot[0])._reinterpret(gl.bfloat16, [2, 64, 128], KV)
        a = _scores(kv, query, stage, first, prefix, lowest, S)
        other = next_slot(slot, S.ring)
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
            slot = next_slot(slot, S.ring)
    at = ((request * S.kv_heads + head) * S.splits + split) * S.pairs
    gl.store(work.stats + (at + pair) * 2, top)
    gl.store(work.stats + (at + pair) * 2 + 1, gl.sum(total, axis=0))
    pair = gl.arange(0, S.pairs, layout=gl.SliceLayout(0, VALUES))[None, :]
    dim = gl.arange(0, 128, layout=gl.SliceLayout(1, VALUES))[:, None]
    gl.store(work.parts + (at + pair) * D + dim, acc)
    return slot


@gluon.jit
@no_type_check
def _attend_nodes(cache, meta, work, layer, num_slots, request, head, pair, value_dim, node_slot, S: gl.constexpr):
    """Attend from some pairs to the rows' own keys: (largest score, sum, weighted values).

    Keys under a head norm are scaled and written here.
    """
    dim = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, MERGE)))[None, None, :]
    node = gl.arange(0, S.padded_nodes, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGE)))[:, None, None]
    row, own_row = request * S.nodes + pair // S.group, request * S.nodes + node
    mask = (pair < S.nodes * S.group) & (dim >= 0)
    mask_own = (node_slot >= 0) & (dim >= 0)
    from_query = work.query + (row * S.heads + head * S.group + pair % S.group) * D
    at = ((layer * num_slots + node_slot) * S.kv_heads + head) * D
    query = gl.load(from_query + place_of(dim), mask, 0.0, cache_modifier=".cg").to(gl.float32)
    if S.has_head_norms:
        raw = work.key + (own_row * S.kv_heads + head) * D + dim
        key = gl.load(raw, mask_own, 0.0, cache_modifier=".cg").to(gl.float32)
        key = (key * _head_scale(work, own_row, S.heads + head, node_slot >= 0, S)).to(gl.bfloat16)
        gl.store(cache[0] + at + dim, key, mask_own)
        is_pair = pair < S.nodes * S.group
        query = rounded(query * _head_scale(work, row, head * S.group + pair % S.group, is_pair, S))
    else:
        key = gl.load(cache[0] + at + dim, mask_own, 0.0, cache_modifier=".cg")
    value = gl.load(cache[1] + at + value_dim, (node_slot >= 0) & (value_dim >= 0), 0.0, cache_modifier=".cg")
    s = gl.expand_dims(gl.sum(query * key.to(gl.float32), axis=2), 2) * SCALE  # [own, pairs, 1]
    seen = gl.load(meta.visible + row, pair < S.nodes * S.group, 0)
    s = gl.where(((seen >> node) & 1) == 1, s, float("-inf"))
    top = gl.max(s, axis=0)
    weight = gl.exp2(s - gl.where(top == float("-inf"), 0.0, top)[None, :, :])
    return top, gl.sum(weight, axis=0), gl.sum(weight * value.to(gl.float32), axis=0)


@gluon.jit
@no_type_check
def merge(cache, meta, work, layer, i, num_slots, ring, turn, S: gl.constexpr):
    """Merge some numbers of the parts of this program's i-th unit, in order, with those of the rows' own keys."""
    request, head, split = unit_of(here(gl.program_id(0)), i, S)
    first = split * S.merged
    PAIRS: gl.constexpr = (S.merged + 127) // 128
    pair = first // D + gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(2, MERGE)))[None, :, None]
    dim = first % D + gl.arange(0, S.merged // PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MERGE)))[None, None, :]
    part = gl.arange(0, S.splits, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGE)))[:, None, None]
    node = gl.arange(0, S.padded_nodes, layout=gl.SliceLayout(1, gl.SliceLayout(2, MERGE)))[:, None, None]
    node_slot = gl.load(meta.slots + request * S.nodes + node, node < S.nodes, -1)
    woken(ring, turn, S, i == 0)
    source = ((request * S.kv_heads + head) * S.splits + part) * S.pairs + pair  # [splits, pairs, 1]
    top = gl.load(work.stats + source * 2, cache_modifier=".cg")
    total = gl.load(work.stats + source * 2 + 1, cache_modifier=".cg")
    acc = gl.load(work.parts + source * D + dim, cache_modifier=".cg")  # [splits, pairs, D]
    own_top, own_total, own_acc = _attend_nodes(
        cache, meta, work, layer, num_slots, request, head, pair, dim, node_slot, S
    )
    highest = gl.maximum(gl.max(top, axis=0), own_top)
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    weight = gl.exp2(top - shift[None, :, :])
    own_weight = gl.exp2(own_top - shift)
    mass = gl.sum(weight * total, axis=0) + own_weight * own_total
    out = (gl.sum(weight * acc, axis=0) + own_weight * own_acc) / gl.where(mass > 0, mass, 1.0)  # [pairs, D]
    pair = first // D + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, gl.SliceLayout(0, MERGE)))[:, None]
    dim = first % D + gl.arange(0, S.merged // PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(0, MERGE)))[None, :]
    row = request * S.nodes + pair // S.group
    to = work.attended + (row * S.heads + head * S.group + pair % S.group) * D + place_of(dim)
    gl.store(to, out.to(gl.bfloat16), (pair < S.nodes * S.group) & (dim >= 0))
