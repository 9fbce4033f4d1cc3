"""bench_wide.py WHO ROWS... : check and time the products of a layer. WHO: gluon, triton, present, torch"""
import sys, time, json, os
import torch
T0 = time.time()
who, rows_list = sys.argv[1], [int(a) for a in sys.argv[2].split(",")]
opts = dict(a.split("=") for a in sys.argv[3:])
H, I, NQ, V, LAYERS = 4096, 14336, 6144, 128256, 4
dev = "cuda"
torch.manual_seed(0)
rnd = lambda *s: torch.empty(*s, device=dev, dtype=torch.bfloat16).normal_(0, 0.02)
wqkv, wo, wgu, wd = rnd(LAYERS, NQ, H), rnd(LAYERS, H, H), rnd(LAYERS, 2 * I, H), rnd(LAYERS, H, I)
norms = (1 + 0.1 * torch.randn(2 * LAYERS, H, device=dev)).bfloat16()
EPS = 1e-5
bytes_of = dict(qkv=2 * NQ * H, o=2 * H * H, gu=4 * I * H, down=2 * I * H)
PARTS = 32

class State:
    def __init__(self, rows):
        self.h = (torch.randn(rows, H, device=dev)).bfloat16()
        self.xw = (self.h.float() * norms[0].float()).bfloat16()
        self.sq = self.h.float().view(rows, PARTS, -1).square().sum(-1).contiguous()
        nan = lambda *s, dt=torch.bfloat16: torch.full(s, float("nan"), device=dev, dtype=dt)
        self.qkv, self.act = nan(rows, NQ), nan(rows, I)
        self.h1, self.xw1, self.sq1 = nan(rows, H), nan(rows, H), nan(rows, PARTS, dt=torch.float32)
        self.h2, self.xw2, self.sq2 = nan(rows, H), nan(rows, H), nan(rows, PARTS, dt=torch.float32)
        self.rows = rows

counts = torch.zeros(4096, dtype=torch.int32, device=dev)
parts = torch.full((2 * 132 * 128 * 256,), float("nan"), device=dev)

def block(rows):
    return max(16, 1 << (rows - 1).bit_length())

if who == "gluon":
    import gluon_wide as gw
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.experimental.gluon import language as gl
    L2, L4 = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(128, 16, rank=4)
    def stages_of(R):
        return {16: 5, 32: 5, 64: 4}[R] if W == 4 else {16: 11, 32: 10, 64: 8, 128: 6}[R]
    W = int(opts.get("warps", 8)); EARLY = opts.get("early", "0") == "1"; NREG = 128 if W == 4 else 168
    cache = {}
    def launch(mode, x, w, out, squares=None, base=None, norm=None, weighted=None, sqo=None, halves=None, progs=132):
        n, k = w.shape
        R = block(len(x))
        key = (mode, n, k, progs)
        p = cache.get(key) or cache.setdefault(key, gw.plan(n, k, progs))
        xd = TensorDescriptor(x, list(x.shape), list(x.stride()), [R, 64], L2)
        if mode == 0:
            wdsc = TensorDescriptor(w, [n, k], [k, 1], [128, 64], L2)
        elif mode == 1:
            wdsc = TensorDescriptor(w, [n // 16, 2, 8, k], [8 * k, n // 2 * k, k, 1], [8, 2, 8, 64], L4)
        else:
            wdsc = TensorDescriptor(w, [n // 8 - 8, 2, 8, k], [8 * k, 64 * k, k, 1], [8, 2, 8, 64], L4)
        d = x
        return gw.wide[(p["grid"],)](wdsc, xd, parts, counts, out, d if base is None else base, d if weighted is None else weighted, counts if sqo is None else sqo, d if norm is None else norm,
            counts if squares is None else squares, len(x), EPS, p["Q"], N=n, K=k, TILES=p["TILES"], KB=p["KB"], R=R, STAGES=stages_of(R), MOST=p["MOST"], PARTS=0 if squares is None else squares.shape[1], MODE=mode, ONTO=base is not None, W=W, EARLY=EARLY, PDL=True,
            num_warps=W, maxnreg=NREG, launch_pdl=True, enable_fp_fusion=False)
    qkv_mode = 2
if who == "triton":
    import triton_wide as tw
    from triton.tools.tensor_descriptor import TensorDescriptor
    cache = {}
    def launch(mode, x, w, out, squares=None, base=None, norm=None, weighted=None, sqo=None, progs=132):
        n, k = w.shape
        R = block(len(x))
        bn, bk = (64 if mode == 1 else 128), int(opts.get("bk", 64))
        st = int(opts.get("stages", 0)) or (196608 // ((128 + R) * 2 * bk))
        key = (mode, n, k, progs)
        p = cache.get(key) or cache.setdefault(key, tw.plan(n // 2 if mode == 1 else n, k, bn, bk, progs))
        d = x
        return tw.twide[(p["grid"],)](TensorDescriptor(w, [n, k], [k, 1], [bn, bk]), TensorDescriptor(x, list(x.shape), list(x.stride()), [R, bk]), parts, counts, out, d if base is None else base, d if weighted is None else weighted, counts if sqo is None else sqo, d if norm is None else norm,
            counts if squares is None else squares, len(x), EPS, p["Q"], N=n, K=k, TILES=p["TILES"], KB=p["KB"], BN=bn, BK=bk, R=R, STAGES=st, MOST=p["MOST"], PARTS=0 if squares is None else squares.shape[1], MODE=mode, ONTO=base is not None, PDL=True,
            num_warps=4 if mode == 1 and R <= 64 else 8, launch_pdl=True, enable_fp_fusion=False)
    qkv_mode = 0
if who in ("gluon", "triton"):
    def qkv(s, l, x=None): return launch(qkv_mode, s.xw, wqkv[l], s.qkv, squares=s.sq)
    def o(s, l): return launch(0, s.qkv[:, :H], wo[l], s.h1, base=s.h, norm=norms[2 * l], weighted=s.xw1, sqo=s.sq1)
    def gu(s, l): return launch(1, s.xw1, wgu[l], s.act, squares=s.sq1)
    def down(s, l): return launch(0, s.act, wd[l], s.h2, base=s.h1, norm=norms[2 * l + 1], weighted=s.xw2, sqo=s.sq2)
    def swap(s): s.h, s.xw, s.sq, s.h2, s.xw2, s.sq2 = s.h2, s.xw2, s.sq2, s.h, s.xw, s.sq
if who == "present":
    from specsim.fast.model.linear import linear, linear_gated, linear_onto
    from specsim.fast.model.rows import Norm, Rows
    def qkv(s, l): s.qkv = linear(Rows(s.h, Norm(norms[0], EPS), s.xw, s.sq) if s.xw is not None else s.first, wqkv[l])
    def o(s, l):
        s.mid = linear_onto(s.h, Rows(s.qkv[:, :H]), wo[l], norm=Norm(norms[2 * l], EPS))
    def gu(s, l): s.act = linear_gated(s.mid, wgu[l])
    def down(s, l):
        s.last = linear_onto(s.mid.values, Rows(s.act), wd[l], norm=Norm(norms[2 * l + 1], EPS))
    def swap(s): s.first = s.last; s.h, s.xw, s.sq = s.last.values, s.last.weighted, s.last.squares
if who == "torch":
    import torch.nn.functional as F
    def qkv(s, l): s.qkv = F.linear(s.xw, wqkv[l])
    def o(s, l): s.h1 = F.linear(s.qkv[:, :H], wo[l])
    def gu(s, l): s.gu = F.linear(s.xw1, wgu[l])
    def down(s, l): s.h2 = F.linear(s.act, wd[l])
    def swap(s): pass

def timed(f, per, n=12):
    f(); torch.cuda.synchronize()
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): f()
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    for _ in range(2): g.replay()
    ev = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
    for a, b in ev: a.record(); g.replay(); b.record()
    torch.cuda.synchronize()
    return sorted(1e3 * a.elapsed_time(b) / per for a, b in ev)[n // 2]

def within(name, found, exact, units):
    exact = exact.double()
    budget = units * 2**-8 * (exact.abs() + exact.square().mean().sqrt())
    e = ((found.double() - exact).abs() / budget).max().item()
    ok = e <= 1
    print(f"   check {name}: {e:.3f} of the budget {'ok' if ok else 'FAILED'}", flush=True)
    return ok

def check(rows):
    s = State(rows); ok = True
    kernels = {}
    for name, f in (("qkv", qkv), ("o", o), ("gu", gu), ("down", down)):
        kernels[name] = f(s, 0)
        torch.cuda.synchronize()
    norm = lambda h, w: h.double() * (h.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    scale = lambda sq: (sq.double().sum(1, keepdim=True) / H + EPS).rsqrt()
    ok &= within("qkv", s.qkv, (s.xw.double() * scale(s.sq)) @ wqkv[0].double().T, 1)
    ok &= within("o", s.h1, s.h.double() + s.qkv[:, :H].double() @ wo[0].double().T, 2)
    ok &= torch.equal(s.xw1, s.h1 * norms[0])
    ok &= within("squares", s.sq1.sum(1), s.h1.double().square().sum(1), 0.01)
    g, u = ((s.xw1.double() * scale(s.sq1)) @ wgu[0].double().T).split(I, -1)
    ok &= within("gate-up", s.act, torch.nn.functional.silu(g) * u, 4)
    ok &= within("down", s.h2, s.h1.double() + s.act.double() @ wd[0].double().T, 2)
    ok &= torch.equal(s.xw2, s.h2 * norms[1])
    first = [t.clone() for t in (s.qkv, s.h1, s.sq1, s.act, s.h2, s.sq2)]
    for i in range(30):
        for f in (qkv, o, gu, down): f(s, 0)
        same = all(torch.equal(a, b) for a, b in zip(first, (s.qkv, s.h1, s.sq1, s.act, s.h2, s.sq2)))
        if not same: print("   run", i, "differs FAILED"); ok = False; break
    print(f"  rows {rows}: {'all right' if ok else 'WRONG'};", "; ".join(f"{n} regs {k.n_regs} spills {k.n_spills} shared {k.metadata.shared}" for n, k in kernels.items()), f"counts left {int(counts.abs().sum())}", flush=True)
    return ok, [t[: 16].clone() for t in first] if rows >= 16 else None

if who in ("gluon", "triton"):
    kept = {}
    for rows in rows_list:
        torch.manual_seed(5)
        try:
            good, kept[rows] = check(rows)
        except Exception as e:
            import traceback; traceback.print_exc(); sys.exit(3)
        if not good and not opts.get("go"): sys.exit(2)
if who in ("gluon",):  # the same first rows among 16, 64, 128
    big = State(128); outs = []
    for rows in rows_list:
        s = State(rows); s.h.copy_(big.h[:rows]); s.xw.copy_(big.xw[:rows]); s.sq.copy_(big.sq[:rows])
        for f in (qkv, o, gu, down): f(s, 0)
        outs.append([t[:min(rows_list)].clone() for t in (s.qkv, s.h1, s.sq1, s.act, s.h2, s.sq2)])
    print("  rows equal in any number of rows:", [all(torch.equal(a, b) for a, b in zip(outs[0], x)) for x in outs], flush=True)

import turn
if who == "present":
    for rows in rows_list:
        s = State(rows)
        if rows > 64: s.xw, s.first = None, Rows(s.h, Norm(norms[0], EPS))
        for f in (qkv, o, gu, down): f(s, 0)
    torch.cuda.synchronize()
turn.take(f"{who} {opts}")
head = rnd(V, H) if opts.get("head", "1") == "1" else None
for rows in rows_list:
    s = State(rows)
    if who == "present" and rows > 64:
        s.xw = None
        from specsim.fast.model.rows import Norm, Rows
        s.first = Rows(s.h, Norm(norms[0], EPS))
    if who == "torch": s.qkv, s.act, s.xw1 = rnd(rows, NQ), rnd(rows, I), rnd(rows, H)
    qkv(s, 0); o(s, 0); gu(s, 0); down(s, 0)
    res = {}
    for name, f in (("qkv", qkv), ("o", o), ("gu", gu), ("down", down)):
        def several():
            for _ in range(3 if name in ("gu", "down") else 6):
                for l in range(LAYERS): f(s, l)
        try: res[name] = timed(several, LAYERS * (3 if name in ("gu", "down") else 6))
        except Exception as e: res[name] = float("nan"); print("  ", name, repr(e)[:300])
    def chain():
        for _ in range(2):
            for l in range(LAYERS):
                qkv(s, l); o(s, l); gu(s, l); down(s, l); swap(s)
    res["layer"] = timed(chain, 2 * LAYERS)
    if head is not None:
        lo = torch.empty(rows, V, device=dev, dtype=torch.bfloat16)
        if who in ("gluon", "triton"): f = lambda: launch(0, s.xw, head, lo, squares=s.sq)
        elif who == "present":
            x = torch.randn(rows, H, device=dev).bfloat16()
            f = lambda: linear(Rows(x), head)
        else: f = lambda: F.linear(s.xw, head)
        res["head"] = timed(lambda: [f() for _ in range(4)], 4)
    print(f"RES {who} {opts} rows {rows:4d} " + " ".join(f"{k} {v:7.2f}" for k, v in res.items()) + f"  ({time.time() - T0:.0f} s)", flush=True)
