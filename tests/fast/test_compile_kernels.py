"""Kernels compile for GPUs that are not here."""

import os
import subprocess
import sys

import compile_kernels
import pytest
from compile_kernels import APART, PERSISTENT, RUNS, SHARED_MEMORY, every_kernel

from specsim.correctness.faults.fault import changed, copied_package, environment

LATENT = next(str(number) for number, run in enumerate(RUNS) if run.family == "deepseek_v3")
# One name for pointers of two widths: the interpreter runs it, the compiler refuses it.
ONE_NAME = {
    "specsim.fast.attention": "    if num_splits == 1:\n"
    "        {+mask = query_head[:, None] * D + offs_d[None, :]\n        +}out ="
}


def compiled(*arguments: str, env=None, cache) -> subprocess.CompletedProcess:
    command = [sys.executable, compile_kernels.__file__, *arguments]
    env = {**(env or os.environ), "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.whole  # make compile does
def test_kernels_compile_without_a_gpu(tmp_path):
    run = compiled("--run", LATENT, cache=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "programs compiled for compute capability 90." in run.stdout
    names = {line.split()[0] for line in run.stdout.splitlines() if line.startswith("_")}
    assert {"_attention_kernel", "_latent_kernel", "_expert_kernel"} <= names <= every_kernel()


@pytest.mark.whole
def test_the_persistent_forward_keeps_to_its_registers(tmp_path):
    plain = next(str(number) for number, each in enumerate(PERSISTENT) if each == ("llama-3-8b", 1, 1, False))
    run = compiled("--persistent", plain, cache=tmp_path)
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("forward"))
    _, programs, registers, stack_bytes, shared_bytes = line.split()
    assert int(programs) == 1
    assert int(registers) * 384 <= 65_536  # of a multiprocessor, for the twelve warps of its one program
    assert int(stack_bytes) <= 32  # no array and almost no register is in local memory
    assert int(shared_bytes.replace(",", "")) <= SHARED_MEMORY[90]


@pytest.mark.whole
def test_what_the_interpreter_runs_may_not_compile(tmp_path):
    with copied_package(changed(ONE_NAME)) as root:
        run = compiled("--run", LATENT, env=environment(root), cache=tmp_path)
    assert run.returncode == 1
    assert "CompilationError" in run.stderr


def test_kernels_apart_are_kernels():
    assert every_kernel() >= APART
