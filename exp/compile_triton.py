from compile_here import *
import triton_wide as tw
from triton.compiler import ASTSource
def ct(n,k,r,bk,st,mode,onto,parts,warps=8):
    gated = mode==1; bn = 64 if gated else 128
    p = tw.plan(n//2 if gated else n,k,bn,bk)
    sig = dict(w=f"tensordesc<bf16[{bn}, {bk}]>", x=f"tensordesc<bf16[{r}, {bk}]>", parts="*fp32", counts="*i32", out="*bf16", base="*bf16", weighted="*bf16", squares_out="*fp32", norm="*bf16", squares="*fp32", num_rows="i32", eps="fp32", Q="i32")
    con = dict(N=n, K=k, TILES=p["TILES"], KB=p["KB"], BN=bn, BK=bk, R=r, STAGES=st, MOST=p["MOST"], PARTS=parts, MODE=mode, ONTO=onto, PDL=True)
    for c in con: sig[c]="constexpr"
    names = tw.twide.arg_names
    src = ASTSource(tw.twide, {a: sig[a] for a in names}, {(names.index(c),): v for c,v in con.items()}, {(names.index(a),): [["tt.divisibility", 16]] for a in ("parts","counts","out","base","weighted","squares_out","norm","squares")})
    t=time.time()
    k_=triton.compile(src, target=GPUTarget("cuda",90,32), options=dict(num_warps=warps, enable_fp_fusion=False))
    r_,s=res(k_.asm["cubin"])
    print("T",n,k,"R",r,bk,st,mode,p,r_.split("SHARED")[0],"shared",k_.metadata.shared,"HGMMA",s.count("HGMMA"),"LDL",len(re.findall(r"LDL|STL",s)),f"{time.time()-t:.1f}s",flush=True)
    return k_
for r,bk,st in ((64,64,8),(64,128,4),(128,64,6)):
  for a in ((6144,4096,r,bk,st,0,False,32),(4096,4096,r,bk,st,0,True,0),(28672,4096,r,bk,st,1,False,32)):
    k=ct(*a, warps=4 if a[5]==1 else 8)
    if a[0]==4096 and bk==64 and r==64: open("/tmp/tw_ptx.txt","w").write(k.asm["ptx"])
