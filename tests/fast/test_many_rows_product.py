"""Wide products compile for a Hopper GPU without one, and on one are within a budget from float64."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from specsim.core.children import python_path
from specsim.core.pool import KVBuffer, KVLayout
from specsim.fast import layers
from specsim.fast.model import rotary
from specsim.fast.model.linear import linear, linear_gated, linear_residual
from specsim.fast.model.product_plan import ManyRowsPlan, choose, plan_many_rows
from specsim.fast.model.rows import HiddenRows, Norm
from specsim.fast.runtime.launch import has_warp_roles
from specsim.models.tiny_config import tiny_config

MOST_STACK = 512  # bytes of a thread; the matrix instructions' sums alone would need 256
COMPILE = """
import torch
from compile_kernels import compile_only

found = []
with compile_only(90, found.append):
    from specsim.fast.model.linear import linear, linear_gated, linear_residual
    from specsim.fast.model.rows import HiddenRows, Norm

    def zeros(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16)

    for rows in (17, 64):
        norm = Norm(zeros(4096), 1e-5)
        own = linear_residual(zeros(rows, 4096), HiddenRows(zeros(rows, 4096)), zeros(4096, 4096), norm=norm)
        linear(own, zeros(4096, 4096), zeros(4096))
        linear_gated(own, zeros(4096, 4096))
        linear_gated(own, zeros(24576, 4096))
for each in found:
    print(each.name, each.stack_bytes, each.shared_bytes)
"""
on_hopper = pytest.mark.skipif(not has_warp_roles(), reason="needs a GPU of compute capability 9")


@pytest.mark.whole
def test_wide_products_fit_into_a_multiprocessor(tmp_path):
    env = {**os.environ, **python_path(), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [name for name, _, _ in lines] == ["_wide_kernel"] * 8
    assert all(int(stack) <= MOST_STACK and int(shared) <= 232_448 for _, stack, shared in lines)


def assert_within(out: torch.Tensor, exact: torch.Tensor, roundings: int) -> None:
    """Check the error in units of half a last place, of the entry and of the products' scale."""
    assert ((out.double() - exact).abs() <= roundings * 2**-8 * (exact.abs() + exact.square().mean().sqrt())).all()


@on_hopper
@pytest.mark.parametrize(
    ("num_rows", "size", "inner"), [(17, 4096, 4096), (33, 1040, 1096), (64, 24576, 4096), (128, 2064, 14336)]
)
def test_a_wide_product_is_the_product(num_rows, size, inner):
    """Rows may be slices of wider ones, and the product is added to others and prepared for the next norm."""
    assert isinstance(choose(num_rows, size, inner, torch.bfloat16, False), ManyRowsPlan)
    x, weight, bias, base = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((num_rows, inner + 24), (size, inner), (size,), (num_rows, size))
    )
    x = x[:, 3 : inner + 3]
    out = linear(HiddenRows(x), weight, bias)
    assert all(torch.equal(linear(HiddenRows(x), weight, bias), out) for _ in range(20))
    assert_within(out, x.double() @ weight.double().T + bias.double(), 1)
    norm = Norm(torch.randn(size, device="cuda").bfloat16(), 1e-5)
    onto = linear_residual(base, HiddenRows(x), weight, bias, norm=norm)
    assert torch.equal(onto.values, base + out)
    assert torch.equal(onto.weighted, onto.values * norm.weight)
    scale = (onto.values.double().square().mean(1, keepdim=True) + norm.eps).rsqrt()
    weight = torch.randn(4096, size, device="cuda").bfloat16() / size**0.5
    gate, up = ((onto.weighted.double() * scale) @ weight.double().T).chunk(2, 1)
    assert_within(linear_gated(onto, weight), silu(gate) * up, 4)


@on_hopper
def test_a_row_of_a_wide_product_is_the_same_solo_and_batched():
    """So are its residual sum and its square, and the products after these."""
    x, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in ((600, 4096), (4096, 4096)))
    norm = Norm(torch.randn(4096, device="cuda").bfloat16(), 1e-5)

    def results(x: torch.Tensor) -> list[torch.Tensor | None]:
        onto = linear_residual(x, HiddenRows(x), weight, batch_invariant=True, norm=norm)
        after = [multiply(onto, weight, batch_invariant=True) for multiply in (linear, linear_gated)]
        return [onto.values, onto.weighted, onto.squares, *after]

    many = results(x)
    for low, high in ((0, 1), (3, 19), (70, 71), (64, 100), (5, 205), (1, 600)):
        pairs = zip(results(x[low:high]), many, strict=True)
        assert all(torch.equal(own, each[low:high]) for own, each in pairs)


@on_hopper
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "dim", "has_bias", "kv_dtype"),
    [(32, 8, 128, False, torch.bfloat16), (16, 4, 64, True, torch.bfloat16), (9, 3, 64, True, torch.float8_e4m3fn)],
)
def test_wide_heads_equal_projection_and_rotation(num_heads, kv_heads, dim, has_bias, kv_dtype, monkeypatch):
    """One row writes no KV, and no slot of another row changes."""
    config = tiny_config(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim, attention_bias=has_bias)
    width = (num_heads + 2 * kv_heads) * dim
    x, weight, bias, weight_of_norm = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((40, 2048), (width, 2048), (width,), (2048,))
    )
    tensors = {"qkv_proj.weight": weight / 45} | ({"qkv_proj.bias": bias} if has_bias else {})
    rows = HiddenRows(x, Norm(weight_of_norm, 1e-5), x * weight_of_norm, x.float().square().sum(1, keepdim=True))
    slots = torch.randperm(100, device="cuda")[:40]
    slots[3] = -1
    positions = torch.randint(0, 5000, (40,), device="cuda")
    frequencies = rotary.inverse_frequencies(config.rope).to("cuda")
    turns = rotary.rotations(positions, frequencies, torch.bfloat16)
    found = []
    for plan in (plan_many_rows(width, 2048), None):
        monkeypatch.setattr("specsim.fast.model.linear.choose", lambda *_, plan=plan: plan)
        kv = KVBuffer(KVLayout(2, kv_heads, dim), 100, kv_dtype, torch.device("cuda"))
        for pool in (kv.keys, kv.values):
            pool.fill_(torch.nan)
        forward = rotary.ForwardContext(turns, SimpleNamespace(slots=slots), kv)
        found.append((layers._queries(rows, layers.Weights(tensors), config, 1, forward), kv.keys, kv.values))
    for fused, apart in zip(*found, strict=True):
        fused, apart = fused.float(), apart.float()
        assert torch.equal(fused.isnan(), apart.isnan())
        share = 2**-3 if kv_dtype.itemsize == 1 else 2**-5
        most = share * float(apart.nan_to_num().abs().max())
        torch.testing.assert_close(fused.nan_to_num(), apart.nan_to_num(), rtol=0, atol=most)
