"""Kernels compile for GPUs that are not here."""

import os
import subprocess
import sys

from specsim.correctness.faults.injection import Edit, changed, copied_package, environment
from specsim.maintain.compile_kernels import APART, RUNS, every_kernel

LATENT = next(str(number) for number, run in enumerate(RUNS) if run.family == "deepseek_v3")
# One name for pointers of two widths: the interpreter runs it, the compiler refuses it.
ONE_NAME = Edit(
    "specsim.fast.attention",
    "    if num_splits == 1:\n        out =",
    "    if num_splits == 1:\n        mask = query_head[:, None] * D + offs_d[None, :]\n        out =",
)


def compiled(*arguments: str, env=None, cache) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "specsim.maintain.compile_kernels", *arguments]
    env = {**(env or os.environ), "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_kernels_compile_without_a_gpu(tmp_path):
    run = compiled("--run", LATENT, cache=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "programs compiled for compute capability 90." in run.stdout
    names = {line.split()[0] for line in run.stdout.splitlines() if line.startswith("_")}
    assert {"_attention_kernel", "_latent_kernel", "_expert_kernel"} <= names <= every_kernel()


def test_what_the_interpreter_runs_may_not_compile(tmp_path):
    with copied_package(changed([ONE_NAME])) as root:
        run = compiled("--run", LATENT, env=environment(root), cache=tmp_path)
    assert run.returncode == 1
    assert "CompilationError" in run.stderr


def test_kernels_apart_are_kernels():
    assert every_kernel() >= APART
