import torch, time, turn
T0=time.time()
from specsim.bench.tree_attention import trees, check_attention, HEADS, HEAD_DIM
from specsim.bench.clock import launched
from specsim.fast.model import attention_plan
from specsim.fast.model.attention_plan import Tiling
from specsim.fast.attention import attention
from specsim.fast.model.draft_metadata import tree_metadata
CASES=[(1,64,1024,40),(16,8,1024,4),(1,8,1024,40)]
TILINGS={(1,64):[None,Tiling(64,64,3,4,2),Tiling(32,64,3,4,2),Tiling(64,32,4,4,2),Tiling(128,32,4,8,1),Tiling(64,64,3,4,1),Tiling(32,64,3,4,1)],(16,8):[None,Tiling(32,32,4,4,2),Tiling(32,64,4,4,1)],(1,8):[None,Tiling(32,32,4,4,2),Tiling(32,64,3,2,2),Tiling(16,64,4,4,2)]}
SPLITS={(1,64):[None,2,4,8,16],(16,8):[None,1,2,4],(1,8):[None,8,16]}
original=attention_plan._tiling
first=True
jobs=[]
for r,n,c,layers in CASES:
    case=trees(r,n,16,layers,c); md=tree_metadata(case.batch,case.verify_input,case.pools); chk=check_attention(case)
    for t in TILINGS[(r,n)]:
        for s in SPLITS[(r,n)]:
            def run(layer, t=t,s=s,case=case,md=md):
                attention_plan._tiling=(lambda *a: t) if t else original
                return attention(case.query, layer, case.pools.target, md, None, splits=s)
            try: ok=chk(run(0)).passed
            except Exception as e: ok=repr(e)[:80]
            jobs.append((r,n,c,t,s,ok,run,layers))
turn.take("attention")
for r,n,c,t,s,ok,run,layers in jobs:
    us=launched(run,layers,10,80).median_us if ok is True else float("nan")
    print(f"ATT requests {r} nodes {n} columns {c} tiling {tuple(t) if t else None} splits {s} ok {ok}: {us:.2f} us", flush=True)
print(f"{time.time()-T0:.0f} s")
