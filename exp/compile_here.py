import sys, re, subprocess, tempfile, pathlib, time
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon import language as gl
import gluon_wide as gw
from types import SimpleNamespace

def res(cubin):
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin); f.flush()
        t = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True).stdout
        s = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True).stdout
    return re.search(r"REG:(\d+) STACK:(\d+).*", t)[0] if re.search(r"REG:", t) else t, s

def compile_wide(n, k, r, stages, mode, onto, parts, pdl=True, W=8, early=False, nreg=168):
    p = gw.plan(n, k)
    L2 = gl.NVMMASharedLayout(128, 16, rank=2); L4 = gl.NVMMASharedLayout(128, 16, rank=4)
    wt = f"tensordesc<bf16[128, 64],{L2!r}>" if mode == 0 else f"tensordesc<bf16[8, 2, 8, 64],{L4!r}>"
    sig = dict(w=wt, x=f"tensordesc<bf16[{r}, 64],{L2!r}>", parts="*fp32", counts="*i32", out="*bf16", base="*bf16", weighted="*bf16", squares_out="*fp32", norm="*bf16", squares="*fp32", num_rows="i32", eps="fp32", Q="i32")
    con = dict(N=n, K=k, TILES=p["TILES"], KB=p["KB"], R=r, STAGES=stages, MOST=p["MOST"], PARTS=parts, MODE=mode, ONTO=onto, W=W, EARLY=early, PDL=pdl)
    for c in con: sig[c] = "constexpr"
    names = gw.wide.arg_names
    cons = {(names.index(c),): v for c, v in con.items()}
    attrs = {(names.index(a),): [["tt.divisibility", 16]] for a in ("parts","counts","out","base","weighted","squares_out","norm","squares")}
    src = GluonASTSource(gw.wide, {a: sig[a] for a in names}, cons, attrs)
    t = time.time()
    k_ = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=W, maxnreg=nreg, enable_fp_fusion=False))
    r_, s = res(k_.asm["cubin"])
    print("W",W,nreg,n, k, "R", r, "stages", stages, "mode", mode, onto, p, "|", r_.split("SHARED")[0], "shared", k_.metadata.shared, "HGMMA", s.count("HGMMA"), "LDL", len(re.findall(r"LDL|STL", s)), f"{time.time()-t:.1f}s", flush=True)
    return k_
if __name__ == "__main__":
    print(triton.__version__)
    k = compile_wide(4096, 14336, 64, 8, 0, True, 0)
    open("/tmp/wide_ptx.txt","w").write(k.asm["ptx"])
