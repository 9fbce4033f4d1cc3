import sys, time, collections, torch
T0 = time.time()
from specsim.bench import rounds
from specsim.bench.rounds import scene_of, random_pair, stacked, SpecConfig, EAGLE3
from specsim.fast.model.draft_metadata import tree_metadata
from specsim.fast.runtime.graph import capture
from specsim.bench.clock import replayed
pair = stacked(random_pair("llama-3-8b", "cuda", torch.bfloat16))
import turn
state = {"took": False}
def show(name, replay):
    if not state["took"]: turn.take("profile"); state["took"] = True
    t = replayed(replay, 15)
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(2): replay()
        torch.cuda.synchronize()
    found = collections.defaultdict(list)
    for e in p.events(): found[e.name].append(e.device_time if hasattr(e, "device_time") else e.cuda_time)
    print(f"PROFILE {name}: {t.median_us:.0f} us ({time.time()-T0:.0f} s)")
    for k, v in sorted(found.items(), key=lambda kv: -sum(kv[1]))[:16]:
        print(f"   {k[:90]:90s} {sum(v)/2:9.1f} us  {len(v)//2:5d} launches  {sum(v)/len(v):7.2f} each")
    sys.stdout.flush()
scene = scene_of(pair, SpecConfig(topk=8, num_steps=6, num_draft_tokens=64))
vi = scene.round().verify_input
engine = scene.engine
@torch.inference_mode()
def forward():
    metadata = tree_metadata(scene.batch, vi, scene.pools)
    out = engine.target.forward(vi.draft_tokens.view(-1), metadata, scene.pools.target, engine.drafter.feature_layers)
    return engine.target.logits(out.hidden)
g = capture(forward, torch.device("cuda"))
second = scene_of(pair, EAGLE3, requests=16)
second.round()
show("verify forward of 64", g.replay)
show("EAGLE-3 round at 16 requests", second.replay)
