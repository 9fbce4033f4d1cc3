"""The wide kernel inside the package: products against float64, invariance, then forwards and rounds with and without."""
import sys, time, torch
T0 = time.time()
from specsim.fast.model import product_plan, wide_plan
from specsim.fast.model.linear import linear, linear_gated, linear_onto
from specsim.fast.model.rows import Norm, Rows
from specsim.fast import layers
from specsim.fast.model import rotary
from specsim.core.pool import KVBuffer, KVLayout
from specsim.models.tiny_config import tiny_config
from types import SimpleNamespace
dev = "cuda"; bad = 0
print("wide products:", product_plan.has_wide_products(), flush=True)
def within(name, found, exact, units=1.0):
    global bad
    budget = units * 2**-8 * (exact.abs() + exact.square().mean().sqrt())
    e = ((found.double() - exact).abs() / budget).max().item()
    if not e <= 1: bad += 1; print(f"  FAILED {name}: {e}", flush=True)
    return e
worst = 0
for rows, n, k in ((17, 4096, 4096), (33, 1040, 1096), (65, 2064, 1096), (100, 1024, 14336), (128, 6144, 4096)):
    x = torch.randn(rows, k, device=dev).bfloat16(); w = (torch.randn(n, k, device=dev) * 0.02).bfloat16(); b = torch.randn(n, device=dev).bfloat16()
    assert isinstance(product_plan.choose(rows, n, k, torch.bfloat16, False), wide_plan.WidePlan)
    exact = x.double() @ w.double().T
    worst = max(worst, within(f"plain {rows} {n} {k}", linear(Rows(x), w, b), exact + b.double()))
    wide = torch.randn(rows, k + 24, device=dev).bfloat16()
    worst = max(worst, within(f"strided {rows}", linear(Rows(wide[:, 3:3 + k]), w), wide[:, 3:3 + k].double() @ w.double().T))
    base = torch.randn(rows, n + 3, device=dev).bfloat16()[:, 3:]; out = torch.full((rows, n + 5), 9.0, device=dev).bfloat16()
    norm = Norm(torch.randn(n, device=dev).bfloat16(), 1e-5)
    got = linear_onto(base, Rows(x), w, b, norm=norm, out=out[:, 2:n + 2])
    if not torch.equal(got.values, base + linear(Rows(x), w, b)): bad += 1; print("  FAILED onto", rows)
    if not (torch.equal(got.weighted, got.values * norm.weight) and (out[:, :2] == 9).all() and (out[:, n + 2:] == 9).all()): bad += 1; print("  FAILED weighted", rows)
    within("squares", got.squares.sum(1), got.values.double().square().sum(1), 0.01)
    scale = (got.squares.double().sum(1, keepdim=True) / n + 1e-5).rsqrt()
    w2 = (torch.randn(2064, n, device=dev) * 0.02).bfloat16(); b2 = torch.randn(2064, device=dev).bfloat16()
    g, u = ((got.weighted.double() * scale) @ w2.double().T + b2.double()).chunk(2, 1)
    worst = max(worst, within(f"gated {rows}", linear_gated(got, w2, b2), torch.nn.functional.silu(g) * u, 4))
    worst = max(worst, within(f"normed {rows}", linear(got, w2), (got.weighted.double() * scale) @ w2.double().T))
print(f"products: worst share of the budget {worst:.3f}, {bad} failed ({time.time()-T0:.0f} s)", flush=True)
x = torch.randn(600, 4096, device=dev).bfloat16(); w = (torch.randn(4096, 4096, device=dev) * 0.02).bfloat16()
many, gated = linear(Rows(x), w, batch_invariant=True), linear_gated(Rows(x), w, batch_invariant=True)
for low, high in ((0, 1), (3, 19), (70, 71), (64, 100), (10, 60), (5, 205), (1, 600)):
    if not torch.equal(linear(Rows(x[low:high]), w, batch_invariant=True), many[low:high]) or not torch.equal(linear_gated(Rows(x[low:high]), w, batch_invariant=True), gated[low:high]):
        bad += 1; print("  FAILED invariance", low, high)
try:
    config = None
    for heads, kvh, D, fp8, bias in ((32, 8, 128, False, False), (16, 4, 64, False, True), (32, 8, 128, True, False), (9, 3, 64, False, False)):
        rows_n = 40; K = 2048; width = (heads + 2 * kvh) * D
        norm = Norm(torch.randn(K, device=dev).bfloat16(), 1e-5)
        tensors = {"qkv_proj.weight": (torch.randn(width, K, device=dev) / 45).bfloat16()}
        if bias: tensors["qkv_proj.bias"] = torch.randn(width, device=dev).bfloat16()
        cfg = tiny_config(num_heads=heads, num_kv_heads=kvh, head_dim=D, attention_bias=bias)
        x = torch.randn(rows_n, K, device=dev).bfloat16()
        rows = Rows(x, norm, x * norm.weight, x.float().square().sum(1, keepdim=True))
        slots = torch.randperm(100, device=dev)[:rows_n]; slots[3] = -1
        turns = rotary.rotations(torch.randint(0, 5000, (rows_n,), device=dev), rotary.inverse_frequencies(cfg.rope).to(dev), torch.bfloat16)
        left = []
        for on in (True, False):
            product_plan.choose.cache_clear(); keep = product_plan.has_wide_products
            if not on: product_plan.has_wide_products = lambda: False
            kv = KVBuffer(KVLayout(2, kvh, D), 100, torch.float8_e4m3fn if fp8 else torch.bfloat16, dev)
            kv.keys.fill_(float("nan")); kv.values.fill_(float("nan"))
            q = layers._queries(rows, layers.Weights(tensors), cfg, 1, rotary.Forward(turns, SimpleNamespace(slots=slots), kv))
            left.append((q, kv.keys, kv.values)); product_plan.has_wide_products = keep; product_plan.choose.cache_clear()
        for name, a, b in zip("qkv", *left):
            a, b = a.float(), b.float()
            ok = torch.equal(a.isnan(), b.isnan()) and ((a.nan_to_num() - b.nan_to_num()).abs().max() <= (2**-3 if fp8 and name != "q" else 8 * 2**-8) * b.nan_to_num().abs().max())
            if not ok: bad += 1; print("  FAILED heads", heads, D, fp8, name)
except Exception:
    import traceback; traceback.print_exc(); bad += 1
print(f"{bad} failed ({time.time()-T0:.0f} s)", flush=True)
from specsim.bench.rounds import scene_of, random_pair, stacked, SpecConfig, EAGLE3
from specsim.bench.round_checks import check_round
from specsim.bench.clock import replayed, launched
from specsim.fast.model.draft_metadata import tree_metadata
from specsim.fast.runtime.graph import capture
pair = stacked(random_pair("llama-3-8b", "cuda", torch.bfloat16))
keep = product_plan.has_wide_products
def setting(on):
    product_plan.has_wide_products = keep if on else (lambda: False)
    product_plan.choose.cache_clear()
def forward_of(nodes):
    steps, topk = (3, 4) if nodes <= 8 else (6, 8)
    scene = scene_of(pair, SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=nodes))
    vi = scene.round().verify_input; engine = scene.engine
    @torch.inference_mode()
    def forward():
        metadata = tree_metadata(scene.batch, vi, scene.pools)
        out = engine.target.forward(vi.draft_tokens.view(-1), metadata, scene.pools.target, engine.drafter.feature_layers)
        return engine.target.logits(out.hidden)
    return scene, forward
only = sys.argv[1:]
for nodes in (64, 32):
    for on in (True, False):
        setting(on)
        scene, forward = forward_of(nodes)
        c = check_round(scene) if on and nodes == 64 else None
        print(f"FWD nodes {nodes} wide {on}: {launched(lambda _: forward(), 1, 20, 1).median_us:.0f} us  {'check '+str(c.passed)+' '+format(c.error,'.3f') if c else ''} ({time.time()-T0:.0f} s)", flush=True)
        if on and nodes == 64:
            import collections
            from torch.profiler import profile, ProfilerActivity
            g = capture(forward, torch.device("cuda")); g.replay()
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                g.replay(); torch.cuda.synchronize()
            found = collections.defaultdict(list)
            ev = sorted((e for e in p.events() if e.device_time > 0), key=lambda e: e.time_range.start)
            for e in ev: found[e.name].append(e.device_time)
            for k, v in sorted(found.items(), key=lambda kv: -sum(kv[1]))[:7]: print(f"   {k[:60]:60s} {sum(v):9.1f} us {len(v)} launches {sum(v)/len(v):7.2f} each")
            mid = [e for e in ev if "kernel" in e.name][100:113]
            t0 = mid[0].time_range.start
            for e in mid: print(f"      {e.time_range.start-t0:9.1f} .. {e.time_range.end-t0:9.1f}  {e.name[:40]}")
        del scene, forward; torch.cuda.empty_cache()
for requests, inv in ((16, False), (16, True), (1, True), (4, False)):
    for on in (True, False):
        setting(on)
        scene = scene_of(pair, EAGLE3, requests=requests, batch_invariant=inv)
        c = check_round(scene) if on and requests == 16 else None
        print(f"ROUND requests {requests} invariant {inv} wide {on}: {replayed(scene.replay, 15).median_us:.0f} us {'check '+str(c.passed)+' '+format(c.error,'.3f') if c else ''} ({time.time()-T0:.0f} s)", flush=True)
        del scene; torch.cuda.empty_cache()
