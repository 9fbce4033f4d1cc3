"""Wide products in Gluon: stream-K over tiles of 128 outputs, a producer warp with TMA, wgmma with weights as M."""
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BN = gl.constexpr(128)
BK = gl.constexpr(64)


@gluon.jit
def step(slot, phase, N: gl.constexpr):
    last = slot == N - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_weights(w, tile, kb, bar, to, MODE: gl.constexpr):
    if MODE == 0:
        tma.async_copy_global_to_shared(w, [tile * 128, kb * 64], bar, to)
    else:
        to = to._reinterpret(gl.bfloat16, [8, 2, 8, 64], gl.NVMMASharedLayout(128, 16, rank=4))
        if MODE == 1:
            tma.async_copy_global_to_shared(w, [tile * 8, 0, 0, kb * 64], bar, to)
        else:
            tma.async_copy_global_to_shared(w, [tile * 16, 0, 0, kb * 64], bar, to)


@gluon.jit
def producer(w, x, ring_w, ring_x, full, empty, Q, TILES: gl.constexpr, KB: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):
    start = gl.program_id(0) * Q
    end = gl.minimum(start + Q, TILES * KB)
    ready = gl.minimum(STAGES, end - start)
    for i in range(ready):
        u = start + i
        mbarrier.expect(full.index(i), (128 + R) * 128)
        copy_weights(w, u // KB, u % KB, full.index(i), ring_w.index(i), MODE)
    if PDL:
        gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    for i in range(ready):
        tma.async_copy_global_to_shared(x, [0, (start + i) % KB * 64], full.index(i), ring_x.index(i))
    slot, phase = 0, 0
    for u in range(start + ready, end):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), (128 + R) * 128)
        copy_weights(w, u // KB, u % KB, full.index(slot), ring_w.index(slot), MODE)
        tma.async_copy_global_to_shared(x, [0, u % KB * 64], full.index(slot), ring_x.index(slot))
        slot, phase = step(slot, phase, STAGES)
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def pair_of(acc, R: gl.constexpr):
    first, second = acc.reshape([8, 2, 8, R]).permute((0, 2, 3, 1)).split()
    return first.reshape([64, R]), second.reshape([64, R])


@gluon.jit
def finish(acc, scale, tile, out, base, weighted, squares_out, norm, num_rows, N: gl.constexpr, TILES: gl.constexpr, R: gl.constexpr, MODE: gl.constexpr, ONTO: gl.constexpr, SCALED: gl.constexpr):
    L: gl.constexpr = acc.type.layout
    if SCALED:
        acc = acc * scale[None, :]
    if MODE == 0:
        m = tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
        r = gl.arange(0, R, layout=gl.SliceLayout(0, L))[None, :]
        mask = (m < N) & (r < num_rows)
        at = r * N + m
        if ONTO:
            b = gl.load(base + at, mask=mask, other=0.0)
            n = gl.load(norm + m, mask=m < N, other=0.0)
            acc = (b.to(gl.float32) + acc.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
            gl.store(out + at, acc, mask=mask)
            v = acc.to(gl.float32)
            gl.store(weighted + at, (v * n.to(gl.float32)).to(gl.bfloat16), mask=mask)
            sq = gl.sum(gl.where(mask, v * v, 0.0), axis=0)
            r1 = gl.arange(0, R, layout=gl.SliceLayout(0, L))
            gl.store(squares_out + r1 * TILES + tile, sq, mask=r1 < num_rows)
        else:
            gl.store(out + at, acc.to(gl.bfloat16), mask=mask)
    else:
        first, second = pair_of(acc, R)
        P: gl.constexpr = first.type.layout
        r = gl.arange(0, R, layout=gl.SliceLayout(0, P))[None, :]
        if MODE == 1:
            g = first.to(gl.bfloat16).to(gl.float32)
            up = second.to(gl.bfloat16).to(gl.float32)
            shrunk = gl.exp(-gl.abs(g))
            silu = (g * gl.where(g >= 0, 1.0, shrunk) / (1.0 + shrunk)).to(gl.bfloat16).to(gl.float32)
            m = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, P))[:, None]
            gl.store(out + r * (N // 2) + m, (silu * up).to(gl.bfloat16), mask=(m < N // 2) & (r < num_rows))
        else:
            m = tile * 128 + gl.arange(0, 64, layout=gl.SliceLayout(1, P))[:, None]
            gl.store(out + r * N + m, first.to(gl.bfloat16), mask=(m < N) & (r < num_rows))
            gl.store(out + r * N + m + 64, second.to(gl.bfloat16), mask=(m < N) & (r < num_rows))


@gluon.jit
def multiply(ring_w, ring_x, full, empty, parts, counts, out, base, weighted, squares_out, norm, squares, num_rows, eps, Q, N: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, KB: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, PARTS: gl.constexpr, MODE: gl.constexpr, ONTO: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, R, 16])
    S: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    if PDL:
        gdc_wait()
    me = gl.program_id(0)
    start = me * Q
    end = gl.minimum(start + Q, TILES * KB)
    scale = gl.full([R], 1.0, gl.float32, gl.SliceLayout(0, L))
    if PARTS > 0:
        WIDTH: gl.constexpr = 32 if PARTS <= 32 else 64 if PARTS <= 64 else 128
        sr = gl.arange(0, R, layout=gl.SliceLayout(1, S))[:, None]
        sp = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, S))[None, :]
        sq = gl.load(squares + sr * PARTS + sp, mask=(sr < num_rows) & (sp < PARTS), other=0.0)
        scale = gl.convert_layout(gl.rsqrt(gl.sum(sq, axis=1) / K + eps), gl.SliceLayout(0, L))
    slot, phase = 0, 0
    tile = start // KB
    low = start
    while low < end:
        high = gl.minimum(end, (tile + 1) * KB)
        acc = gl.zeros([128, R], gl.float32, L)
        for u in range(low, high):
            mbarrier.wait(full.index(slot), phase)
            acc = warpgroup_mma(ring_w.index(slot), ring_x.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=u > low)
            slot, phase = step(slot, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        first_p = tile * KB // Q
        last_p = ((tile + 1) * KB - 1) // Q
        is_last = True
        if last_p > first_p:
            m = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
            r = gl.arange(0, R, layout=gl.SliceLayout(0, L))[None, :]
            at = r * 128 + m
            own = 2 * me + (me == first_p).to(gl.int32)
            gl.store(parts + own * (128 * R) + at, acc)
            gl.thread_barrier()
            is_last = gl.atomic_add(counts + tile, 1, sem="acq_rel", scope="gpu") == last_p - first_p
            if is_last:
                gl.store(counts + tile, 0)
                acc = gl.load(parts + (2 * first_p + 1) * (128 * R) + at, cache_modifier=".cg")
                G: gl.constexpr = 3 if R * 8 // W <= 64 else 1
                for p in range(first_p + 1, last_p + 1, G):
                    for i in gl.static_range(G):
                        acc += gl.load(parts + 2 * (p + i) * (128 * R) + at, mask=(p + i <= last_p) & (at >= 0), other=0.0, cache_modifier=".cg")
        if is_last:
            finish(acc, scale, tile, out, base, weighted, squares_out, norm, num_rows, N, TILES, R, MODE, ONTO, PARTS > 0)
        low = high
        tile += 1


@gluon.jit
def wide(w, x, parts, counts, out, base, weighted, squares_out, norm, squares, num_rows, eps, Q, N: gl.constexpr, K: gl.constexpr, TILES: gl.constexpr, KB: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, PARTS: gl.constexpr, MODE: gl.constexpr, ONTO: gl.constexpr, W: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):
    ring_w = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    ring_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([
        (multiply, (ring_w, ring_x, full, empty, parts, counts, out, base, weighted, squares_out, norm, squares, num_rows, eps, Q, N, K, TILES, KB, R, STAGES, MOST, PARTS, MODE, ONTO, W, PDL)),
        (producer, (w, x, ring_w, ring_x, full, empty, Q, TILES, KB, R, STAGES, MODE, EARLY, PDL)),
    ], [1], [40 if W == 8 else 24])


def plan(n, k, programs=132):
    tiles, kb = -(-n // 128), -(-k // 64)
    units = tiles * kb
    q = -(-units // programs)
    for better in range(q, int(q * 1.04) + 1):
        if kb % better == 0 or better % kb == 0:
            q = better
            break
    most = max(((t + 1) * kb - 1) // q - t * kb // q + 1 for t in range(tiles))
    return dict(Q=q, grid=-(-units // q), TILES=tiles, KB=kb, MOST=most)
