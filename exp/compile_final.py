import os, sys
os.environ["TRITON_INTERPRET"]="0"
import torch, triton
print(triton.__version__)
from specsim.maintain.compile_kernels import compile_only
from specsim.fast.model import wide_product as wp
from specsim.fast.model.wide_plan import plan_wide
from specsim.fast.model.metadata import KVTensors
import specsim.fast.runtime.launch
found=[]
rows_list=[int(a) for a in (sys.argv[1] if len(sys.argv)>1 else "64,128,16").split(",")]
with compile_only(90, found.append):
    for R in rows_list:
        bf=lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
        x=bf(R,512); sq=torch.zeros(R,4); 
        w=bf(512,512)
        def show(n):
            print(R, n, found[-1], flush=True)
        wp.multiply_wide(plan_wide(512,4096)._replace(num_tiles=4), bf(R,4096), None, 0.0, bf(512,4096), wp.Finish(rows=bf(R,512), weighted=bf(R,512), squares=torch.zeros(R,4), base=bf(R,512), next_norm=bf(512))); show("onto")
        wp.multiply_wide(plan_wide(512,4096), bf(R,4096), torch.zeros(R,32), 1e-5, bf(512,4096), wp.Finish(rows=bf(R,512), bias=bf(512))); show("plain")
        wp.multiply_wide(plan_wide(1024,4096), bf(R,4096), torch.zeros(R,32), 1e-5, bf(1024,4096), wp.Finish(rows=bf(R,512)), True); show("gated")
        for D in (128,64):
            kvt=KVTensors(bf(100,2,D),bf(100,2,D),1.0,1.0)
            n=8*D
            wp.multiply_wide(plan_wide(n,4096), bf(R,4096), torch.zeros(R,32), 1e-5, bf(n,4096), wp.Finish(heads=wp.Heads(bf(R,4,D),kvt,bf(R,2,D//2),torch.zeros(R,dtype=torch.int64)))); show(f"heads {D}")
