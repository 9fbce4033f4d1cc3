"""Finishers of the persistent forward: two warps, each of which takes every other tile from a product."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specsim.fast.persistent.memory import (
    SUMS,
    D,
    here,
    next_slot,
    own_tiles,
    place_of,
    rounded,
    signal,
    skipped,
    woken,
)

_SHARE = gl.BlockedLayout([8, 1, 2], [1, 8, 4], [1, 1, 1], [2, 1, 0])
TILE3 = gl.constexpr(_SHARE)
TILE = gl.constexpr(gl.SliceLayout(0, _SHARE))  # half a tile: 8 outputs of all rows
SQUARES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0]))


@gluon.jit
@no_type_check
def _tile(i, S: gl.constexpr):
    """Number of this program's i-th tile, and places, rows and mask of half a tile."""
    o = gl.arange(0, 8, layout=gl.SliceLayout(1, TILE))[:, None]
    n = gl.arange(0, S.width, layout=gl.SliceLayout(0, TILE))[None, :]
    return here(gl.program_id(0)) + S.programs * i, o, n, (n < S.rows) & (o >= 0)


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
    low_ptr = work.weighted + place_of(at)
    gl.store(low_ptr, (low * low_norm.to(gl.float32)).to(gl.bfloat16), mask)
    gl.store(low_ptr + 2, (high * high_norm.to(gl.float32)).to(gl.bfloat16), mask)
    row = gl.arange(0, S.width, layout=gl.SliceLayout(0, TILE))
    gl.store(work.squares + row * S.residual_tiles + tile, gl.sum(low * low + high * high, axis=0), row < S.rows)


@gluon.jit
@no_type_check
def _finish_rows(work, norm, ring, done, counter, layer, SIDE: gl.constexpr, S: gl.constexpr):
    """Add tiles to the residual rows."""
    for i in range(own_tiles(S.residual_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            at = n * S.hidden + tile * 16 + o
            low_norm, high_norm = gl.load(norm + tile * 16 + o), gl.load(norm + tile * 16 + o + 8)
            low_before = gl.load(work.residual + at, mask, 0.0, cache_modifier=".cg")
            high_before = gl.load(work.residual + at + 8, mask, 0.0, cache_modifier=".cg")
            low, high = _summed(ring, done)
            low, high = low_before + low.to(gl.bfloat16), high_before + high.to(gl.bfloat16)
            _store_rows(work, tile, at, mask, low, high, low_norm, high_norm, n, layer, S)
            signal(work, counter)
        done = next_slot(done, SUMS)
    return done


@gluon.jit
@no_type_check
def _embed(tables, meta, work, SIDE: gl.constexpr, S: gl.constexpr):
    for i in range(own_tiles(S.residual_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            source = tables.embedding + gl.load(meta.ids + n, n < S.rows, 0) * S.hidden + tile * 16 + o
            norm = tables.input_norms + tile * 16 + o
            low, high, low_norm, high_norm = gl.load(source), gl.load(source + 8), gl.load(norm), gl.load(norm + 8)
            at = n * S.hidden + tile * 16 + o
            _store_rows(work, tile, at, mask, low, high, low_norm, high_norm, n, 0, S)
            signal(work, 0)


@gluon.jit
@no_type_check
def _finish_qkv(
    cache, tables, meta, work, layer, num_slots, ring, done, turn, base, SIDE: gl.constexpr, S: gl.constexpr
):
    """Scale and rotate queries and keys, and write queries, keys and values.

    A head norm's weights are applied here, before the rotation, which keeps a head's scale. That needs the squares of
    all its tiles, so attention applies it.
    """
    turn = woken(ring, turn, S)
    scale = _scale(work, S)
    for i in range(own_tiles(S.qkv_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            head, dim = tile // 8, tile % 8 * 8 + o
            slot_of_row = gl.load(meta.slots + n, n < S.rows, -1)
            co = gl.load(meta.cos_sin + n * 128 + dim, mask, 0.0).to(gl.float32)
            si = gl.load(meta.cos_sin + n * 128 + 64 + dim, mask, 0.0).to(gl.float32)
            if S.has_head_norms:
                norm = (tables.query_norms if head < S.heads else tables.key_norms) + layer * D + dim
                low_norm, high_norm = gl.load(norm).to(gl.float32), gl.load(norm + 64).to(gl.float32)
            low, high = _summed(ring, done)
            x, y = rounded(low * scale), rounded(high * scale)
            if head < S.heads + S.kv_heads:
                if S.has_head_norms:
                    at = work.head_squares + (n * (S.heads + S.kv_heads) + head) * 8 + tile % 8
                    gl.store(at, gl.expand_dims(gl.sum(x * x + y * y, axis=0), 0), n < S.rows)
                    x, y = x * low_norm, y * high_norm
                    x, y = x * co - y * si, y * co + x * si
                else:
                    x, y = rounded(x * co) - rounded(y * si), rounded(y * co) + rounded(x * si)
            x, y = x.to(gl.bfloat16), y.to(gl.bfloat16)
            if head < S.heads:
                to = work.query + (n * S.heads + head) * 128 + place_of(dim)
                gl.store(to, x, mask)
                gl.store(to + 64, y, mask)
                signal(work, base + head // S.group)
            else:
                kv_head = (head - S.heads) % S.kv_heads
                offs = ((layer * num_slots + slot_of_row) * S.kv_heads + kv_head) * 128 + dim
                mask_slot = mask & (slot_of_row >= 0)
                if head >= S.heads + S.kv_heads:
                    gl.store(cache[1] + offs, x, mask_slot)
                    gl.store(cache[1] + offs + 64, y, mask_slot)
                elif S.has_head_norms:
                    raw = work.key + (n * S.kv_heads + kv_head) * 128 + dim
                    gl.store(raw, x, mask)
                    gl.store(raw + 64, y, mask)
                else:
                    gl.store(cache[0] + offs, x, mask_slot)
                    gl.store(cache[0] + offs + 64, y, mask_slot)
                signal(work, base + S.at_attended + kv_head)
        done = next_slot(done, SUMS)
    return done, turn


@gluon.jit
@no_type_check
def _finish_gated(work, ring, done, turn, counter, SIDE: gl.constexpr, S: gl.constexpr):
    turn = woken(ring, turn, S)
    scale = _scale(work, S)
    for i in range(own_tiles(S.gate_up_tiles, S)):
        if i % 2 == SIDE:
            tile, o, n, mask = _tile(i, S)
            low, high = _summed(ring, done)
            gate, up = rounded(low * scale), rounded(high * scale)
            shrunk = gl.exp(-gl.abs(gate))
            silu = rounded(gate * gl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk))
            gl.store(work.inner + place_of(n * S.inner + tile * 8 + o), (silu * up).to(gl.bfloat16), mask)
            signal(work, counter + (tile >= S.first_inner_tiles).to(gl.int32))
        done = next_slot(done, SUMS)
    return done, turn


@gluon.jit
@no_type_check
def finisher(cache, tables, meta, work, num_slots, ring, SIDE: gl.constexpr, S: gl.constexpr):
    """Finish this warp's tiles: the embedding, then in each layer its four products."""
    done = (0, 0)
    turn = 0
    base = 1
    _embed(tables, meta, work, SIDE, S)
    for half in range(2 * S.layers):  # of a layer; both add to the residual rows at the end, with one copy of the code
        layer = half // 2
        if half % 2 == 0:
            done, turn = _finish_qkv(cache, tables, meta, work, layer, num_slots, ring, done, turn, base, SIDE, S)
            turn = skipped(ring, turn, 3, S)
            norm, counter, following = tables.inner_norms + layer * S.hidden, base + S.at_o, -1
        else:
            done, turn = _finish_gated(work, ring, done, turn, base + S.at_inner, SIDE, S)
            turn = skipped(ring, turn, 2, S)
            norm, counter, following = tables.input_norms + (layer + 1) * S.hidden, base + S.at_down, layer + 1
        done = _finish_rows(work, norm, ring, done, counter, following, SIDE, S)
        base += half % 2 * S.layer_counters
