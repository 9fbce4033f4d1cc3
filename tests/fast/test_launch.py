"""Launches: their programs, their recorder and their environment."""

import math
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from specsim.core.errors import InputError
from specsim.fast.runtime import launch
from specsim.fast.runtime.launch import INTERPRETED, block_of, kernel, nearest, next_power_of_16, recorder, stored


@kernel
def _note_program(out_ptr, stride, BLOCK: tl.constexpr):
    """Write the number of each program and the block size."""
    program = tl.program_id(0)
    tl.store(out_ptr + program * stride, program)
    tl.store(out_ptr + program * stride + 1, BLOCK)


def run(grid, device, **options):
    out = torch.full((4, 2), -1, device=device)
    _note_program[grid](out, 2, BLOCK=options.get("block", 8))
    return out.tolist()


def test_a_launch_runs_every_program_of_its_grid(device, program_order):
    assert run((3,), device) == [[0, 8], [1, 8], [2, 8], [-1, -1]]


def test_an_empty_grid_runs_nothing(device):
    assert run((0,), device) == [[-1, -1]] * 4


def test_a_recorder_receives_launches_instead(device):
    told = []
    token = recorder.set(lambda name, launch: told.append((name, launch)))
    try:
        assert run((2,), device) == [[-1, -1]] * 4
    finally:
        recorder.reset(token)
    out = torch.full((4, 2), -1, device=device)
    [(name, launch)] = told
    assert name == "_note_program"
    launch()  # on the tensor of the recorded launch, not on this one
    assert out.tolist() == [[-1, -1]] * 4
    assert run((1,), device)[0] == [0, 8]


@kernel
def _sum_in_every_lane(out_ptr, left_ptr, right_ptr, SIZE: tl.constexpr):
    """Write the sum of all lanes' products from each of SIZE lanes."""
    offs = tl.arange(0, SIZE)
    total = tl.sum(tl.load(left_ptr + offs) * tl.load(right_ptr + offs), axis=0)
    tl.store(out_ptr + offs, tl.full((SIZE,), 0.0, tl.float32) + total)


def test_lanes_agree_about_a_sum_of_products(device):
    for _ in range(20):
        left, right, out = torch.rand(32, device=device), torch.rand(32, device=device), torch.empty(32, device=device)
        _sum_in_every_lane[(1,)](out, left, right, SIZE=32, num_warps=1)
        assert out.unique().numel() == 1


def test_products_are_fused_with_sums_where_a_launch_sets_it(monkeypatch):
    told = []
    monkeypatch.setattr(_note_program, "_compiled", {(1,): lambda *args, **kwargs: told.append(kwargs)})
    _note_program[(1,)](None, 2, BLOCK=8)
    _note_program[(1,)](None, 2, BLOCK=8, enable_fp_fusion=True)
    assert [each["enable_fp_fusion"] for each in told] == [False, True]


@kernel
def _cast(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, nearest(tl.load(x_ptr + offs), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype, device):
    """Values include midpoints, their neighbours and NaN."""
    halves = torch.arange(1, 2, 2**-8).repeat(3, 1)  # bf16 holds every second of them
    halves[1:] = torch.nextafter(halves[1:], torch.tensor([[0.0], [3.0]]))
    special = torch.tensor([0.0, -0.0, 1e-30, -6e4, math.inf, -math.inf, math.nan, math.pi])
    x = torch.cat([torch.randn(248), special, halves.flatten()]).to(device)
    out = torch.empty(len(x), dtype=dtype, device=device)
    _cast[(1,)](out, x, BLOCK=len(x))
    assert torch.equal(out.nan_to_num(7.0), x.to(dtype).nan_to_num(7.0))
    assert torch.equal(out.isnan(), x.isnan())


def test_a_kernel_is_compiled_for_pointers_but_for_no_integer():
    """Otherwise a batch of another size might get other code, and other bits."""
    script = """
from specsim.fast.tree.nodes import _select_kernel
print(*(each.name for each in _select_kernel._compiled.params if each.do_not_specialize))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["num_rows", "num_candidates", "count"]


@pytest.mark.parametrize("name", ["stream", "device", "grid"])
def test_a_kernel_has_no_parameter_that_triton_takes(name):
    namespace = {}
    exec(f"def function(out_ptr, {name}): pass", namespace)
    with pytest.raises(ValueError, match=f"function has a parameter {name};"):
        kernel(namespace["function"])


def test_a_power_of_16_holds_all_of_a_count():
    found = {count: next_power_of_16(count) for count in (0, 1, 2, 16, 17, 256, 257, 5000)}
    assert found == {0: 1, 1: 1, 2: 16, 16: 16, 17: 256, 256: 256, 257: 4096, 5000: 65536}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 100])
def test_blocks_are_powers_of_two_that_hold_all_rows(count):
    block = block_of(count, 16)
    assert block == triton.next_power_of_2(block)
    assert block >= count if INTERPRETED else block == 16


OWN_KERNEL = """
@triton.jit
def total_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))) + tl.cdiv(BLOCK, 3) + tl.arange(0, 2).sum())

out = torch.zeros(1, dtype=torch.int64)
total_kernel[(1,)](torch.arange(8), out, BLOCK=8)
assert out.item() == 28 + 3 + 1
"""


@pytest.mark.by_default("import triton.language")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled")
@pytest.mark.parametrize("earlier", ["", "import triton.language", "import torch._dynamo"])
def test_kernels_are_interpreted_whatever_was_imported_before(earlier, tmp_path):
    """Those of the package and, in the same process, one of its user."""
    script = tmp_path / "own.py"  # a file: the interpreter reads the source of a kernel
    text = f"""
{earlier}
import torch
from specsim import EngineOptions, SamplingParams, SpecConfig, generate
from specsim.models.synthetic_pair import synthetic_pair
config, sampling = SpecConfig(2, 1, 2), SamplingParams(max_new_tokens=2)
engines = EngineOptions("reference"), EngineOptions("fast")
tokens = [generate(synthetic_pair(), [[5, 6]], config, sampling, engine=each).outputs[0].token_ids for each in engines]
assert tokens[0] == tokens[1]
import triton
import triton.language as tl
{OWN_KERNEL}"""
    script.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, script], env=environment, check=True)


def test_without_triton_the_reference_still_runs():
    script = """
import sys
from pathlib import Path
sys.modules["triton"] = None
import specsim.reference.engine
from specsim import EngineOptions, SpecConfig
from specsim.core.errors import InputError
from specsim.serving.generation import load_engine
from specsim.models.synthetic_pair import synthetic_pair
load_engine(synthetic_pair(), SpecConfig(), EngineOptions("reference"))
try:
    load_engine(synthetic_pair(), SpecConfig(), EngineOptions("fast"))
except InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.startswith("impl is 'fast'; allowed: reference, unless Triton is installed")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("others", [1, 3, 64, 2**19, 2**30])
def test_no_block_makes_a_tile_larger_than_triton_allows(others):
    block = block_of(2**30, 16, others)
    assert block == triton.next_power_of_2(block)
    assert block * triton.next_power_of_2(others) <= 2**20 or block == 1 or not INTERPRETED


@pytest.mark.by_default("kv")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled")
@pytest.mark.parametrize("module", ["drafters", "kv"])
def test_any_module_may_be_imported_first(module):
    script = f"""
import specsim.fast.{module}
import torch
from specsim.fast.model.rows import silu_mul
assert silu_mul(torch.ones(1, 4)).isfinite().all()
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@kernel
def _store_fp8(out_ptr, x_ptr, scale, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out_ptr + place, stored(tl.load(x_ptr + place), scale, tl.float8e4nv))


@pytest.mark.parametrize("scale", [1.0, 0.37, 8.0])
def test_fp8_is_rounded_to_the_nearest_as_torch_rounds(scale, device):
    """Every number of the type, the middle of every two, random ones of all sizes, and ones beyond the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    spread = torch.randn(512) * 10 ** (torch.rand(512) * 6 - 4)
    x = torch.cat([scale * codes, scale * (codes[1:] + codes[:-1]) / 2, spread, torch.tensor([449.0, 1e9, -1e9, 0.0])])
    x = torch.nn.functional.pad(x, (0, 1024 + 256 - len(x)))[:1024]
    out = torch.zeros(1024, dtype=torch.float8_e4m3fn, device=device)
    _store_fp8[(1,)](out_ptr=out, x_ptr=x.to(device), scale=scale, SIZE=1024)
    expected = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_kv_in_fp8_needs_a_gpu_that_has_it(monkeypatch):
    launch.check_kv_dtypes(kv_dtype="fp8_e4m3")
    monkeypatch.setattr(launch, "capability", lambda: (8, 0))
    launch.check_kv_dtypes(kv_dtype="model")
    with pytest.raises(InputError, match=r"draft_kv_dtype is 'fp8_e4m3'; allowed: model on this GPU.*it has 8.0"):
        launch.check_kv_dtypes(kv_dtype="model", draft_kv_dtype="fp8_e4m3")
    monkeypatch.setattr(launch, "capability", lambda: (8, 9))
    launch.check_kv_dtypes(kv_dtype="fp8_e4m3")
