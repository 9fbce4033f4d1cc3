"""Wide products in plain Triton: stream-K over tiles of 128 outputs, TMA descriptors, a flat pipelined loop."""
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def tfinish(acc, second, scale, tile, out, base, weighted, squares_out, norm, num_rows, N: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, MODE: tl.constexpr, ONTO: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        acc = acc * scale[None, :]
        second = second * scale[None, :]
    m = tile * BN + tl.arange(0, BN)[:, None]
    r = tl.arange(0, R)[None, :]
    if MODE == 1:
        g = acc.to(tl.bfloat16).to(tl.float32)
        up = second.to(tl.bfloat16).to(tl.float32)
        shrunk = tl.exp(-tl.abs(g))
        silu = (g * tl.where(g >= 0, 1.0, shrunk) / (1.0 + shrunk)).to(tl.bfloat16).to(tl.float32)
        tl.store(out + r * (N // 2) + m, (silu * up).to(tl.bfloat16), mask=(m < N // 2) & (r < num_rows))
    else:
        mask = (m < N) & (r < num_rows)
        at = r * N + m
        if ONTO:
            b = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
            acc = (b + acc.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
            tl.store(out + at, acc, mask=mask)
            v = acc.to(tl.float32)
            n = tl.load(norm + m, mask=m < N, other=0.0).to(tl.float32)
            tl.store(weighted + at, (v * n).to(tl.bfloat16), mask=mask)
            sq = tl.sum(tl.where(mask, v * v, 0.0), axis=0)
            r1 = tl.arange(0, R)
            tl.store(squares_out + r1 * TILES + tile, sq, mask=r1 < num_rows)
        else:
            tl.store(out + at, acc.to(tl.bfloat16), mask=mask)


@triton.jit
def twide(w, x, parts, counts, out, base, weighted, squares_out, norm, squares, num_rows, eps, Q, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, KB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr, ONTO: tl.constexpr, PDL: tl.constexpr):
    me = tl.program_id(0)
    start = me * Q
    end = tl.minimum(start + Q, TILES * KB)
    if PDL:
        gdc_wait()
    scale = tl.full([R], 1.0, tl.float32)
    if PARTS > 0:
        WIDTH: tl.constexpr = triton.next_power_of_2(PARTS)
        sr = tl.arange(0, R)[:, None]
        sp = tl.arange(0, WIDTH)[None, :]
        sq = tl.load(squares + sr * PARTS + sp, mask=(sr < num_rows) & (sp < PARTS), other=0.0)
        scale = tl.rsqrt(tl.sum(sq, axis=1) / K + eps)
    low = start
    tile = start // KB
    while low < end:
        high = tl.minimum(end, (tile + 1) * KB)
        acc = tl.zeros([BN, R], tl.float32)
        second = tl.zeros([BN, R], tl.float32)
        for u in tl.range(low, high, num_stages=STAGES):
            kb = u - tile * KB
            xs = x.load([0, kb * BK])
            ws = w.load([tile * BN, kb * BK])
            acc = tl.dot(ws, xs.T, acc)
            if MODE == 1:
                w2 = w.load([N // 2 + tile * BN, kb * BK])
                second = tl.dot(w2, xs.T, second)
        first_p = tile * KB // Q
        last_p = ((tile + 1) * KB - 1) // Q
        is_last = True
        if last_p > first_p:
            m = tl.arange(0, BN)[:, None]
            r = tl.arange(0, R)[None, :]
            at = r * BN + m
            WIDE: tl.constexpr = (2 if MODE == 1 else 1) * BN * R
            own = 2 * me + (me == first_p).to(tl.int32)
            tl.store(parts + own * WIDE + at, acc)
            if MODE == 1:
                tl.store(parts + own * WIDE + BN * R + at, second)
            tl.debug_barrier()
            is_last = tl.atomic_add(counts + tile, 1, sem="acq_rel", scope="gpu") == last_p - first_p
            if is_last:
                tl.store(counts + tile, 0)
                acc = tl.load(parts + (2 * first_p + 1) * WIDE + at, cache_modifier=".cg")
                if MODE == 1:
                    second = tl.load(parts + (2 * first_p + 1) * WIDE + BN * R + at, cache_modifier=".cg")
                for p in range(first_p + 1, last_p + 1):
                    acc += tl.load(parts + 2 * p * WIDE + at, cache_modifier=".cg")
                    if MODE == 1:
                        second += tl.load(parts + 2 * p * WIDE + BN * R + at, cache_modifier=".cg")
        if is_last:
            tfinish(acc, second, scale, tile, out, base, weighted, squares_out, norm, num_rows, N, TILES, BN, R, MODE, ONTO, PARTS > 0)
        low = high
        tile += 1
    if PDL:
        gdc_launch_dependents()


def plan(n, k, bn, bk, programs=132):
    tiles, kb = -(-n // bn), -(-k // bk)
    units = tiles * kb
    q = -(-units // programs)
    for better in range(q, int(q * 1.04) + 1):
        if kb % better == 0 or better % kb == 0:
            q = better
            break
    most = max(((t + 1) * kb - 1) // q - t * kb // q + 1 for t in range(tiles))
    return dict(Q=q, grid=-(-units // q), TILES=tiles, KB=kb, MOST=most)
