"""Rows of hidden states: the kernels round where the reference rounds.

In float32 they reduce in another order.
"""

import pytest
import torch
from torch.nn.functional import silu

from specsim.fast.model import rows as fast
from specsim.reference.layers import rms_norm

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_within(out: torch.Tensor, exact: torch.Tensor, roundings: int, scale: torch.Tensor | float = 1.0) -> None:
    """Check the error from float64, in units of rounding an element of that scale to the type."""
    units = roundings * torch.finfo(out.dtype).eps
    assert ((out.cpu().double() - exact).abs() <= units * exact.abs().clamp(min=scale)).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 31, 64, 65])
def test_fast_rms_norm_is_the_references(size, dtype, device, program_order):
    """Rows have widely different scales.

    They are read from and written to slices of wider tensors.
    """
    scale = torch.tensor([1e-3, 1.0, 30.0, 0.0, 1e-2])[:, None]
    wide, weight = (torch.randn(5, size + 4) * scale).to(dtype), torch.randn(size).to(dtype)
    x, out = wide.to(device)[:, 1 : size + 1], torch.full((5, size + 7), 9.0, dtype=dtype, device=device)
    exact = rms_norm(wide[:, 1 : size + 1].double(), weight.double(), 1e-5)
    assert fast.rms_norm(x, weight.to(device), 1e-5, out=out[:, 3 : size + 3]).data_ptr() == out[:, 3:].data_ptr()
    assert_within(out[:, 3 : size + 3], exact, 4, scale=1e-3)
    assert (out[:, :3] == 9).all()
    assert (out[:, size + 3 :] == 9).all()
    assert torch.equal(fast.rms_norm(x, weight.to(device), 1e-5), out[:, 3 : size + 3])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [7, 48])
def test_a_sum_is_rounded_once_also_in_a_wider_tensor(size, dtype, device, program_order):
    x, delta = torch.randn(6, size + 3).to(dtype), torch.randn(6, size).to(dtype)
    wide = torch.full((6, size + 5), 9.0, dtype=dtype, device=device)
    out = fast.add(x.to(device)[:, 3:], delta.to(device), out=wide[:, 2 : size + 2])
    assert torch.equal(out.cpu(), x[:, 3:] + delta)
    assert (wide[:, :2] == 9).all()
    assert (wide[:, size + 2 :] == 9).all()
    assert torch.equal(fast.add(x.to(device)[:, 3:], delta.to(device)), out)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 31, 64])
def test_embedded_rows_are_prepared_for_the_next_norm(size, dtype, device, program_order):
    table, ids, weight = torch.randn(11, size).to(dtype), torch.tensor([3, 0, 10, 3, 7]), torch.randn(size).to(dtype)
    wide, norm = torch.full((5, size + 5), 9.0, dtype=dtype, device=device), fast.Norm(weight.to(device), 1e-5)
    rows = fast.embed(ids.to(device), table.to(device), norm, out=wide[:, 2 : size + 2])
    assert torch.equal(rows.values.cpu(), table[ids])
    assert (wide[:, size + 2 :] == 9).all()
    if dtype == torch.float16:  # a row times a weight may be too large for it
        assert rows.weighted is rows.squares is None
    else:
        assert torch.equal(rows.weighted.cpu(), table[ids] * weight)
        assert_within(rows.squares[:, 0], table[ids].double().square().sum(1), 2 * size)
    assert_within(rows.normed(), rms_norm(table[ids].double(), weight.double(), 1e-5), 4, scale=1e-3)
    assert torch.equal(rows.normed(), fast.rms_norm(table.to(device), *norm, ids_R=ids.to(device)))
    alone = fast.embed(ids.to(device), table.to(device))
    assert alone.normed() is alone.values
    assert torch.equal(alone.values, rows.values)


@pytest.mark.parametrize("dtype", TYPES)
def test_fast_silu_is_rounded_before_it_meets_the_other_half(dtype, device, program_order):
    """Far from zero neither half overflows nor loses its sign."""
    gate = torch.cat([torch.randn(4, 33) * 3, torch.tensor([-200.0, -20.0, 0.0, 20.0, 200.0]).repeat(4, 1)], dim=1).to(
        dtype
    )
    up = torch.randn(4, 38).to(dtype)
    out = fast.silu_mul(torch.cat([gate, up], dim=1).to(device))
    assert_within(out, silu(gate.double()) * up.double(), 4, scale=torch.finfo(dtype).tiny)


def test_no_rows(device):
    none, table = torch.empty(0, 32, device=device), torch.ones(3, 32, device=device)
    assert fast.rms_norm(none, table[0], 1e-5).shape == (0, 32)
    assert fast.embed(torch.empty(0, dtype=torch.int64, device=device), table).values.shape == (0, 32)
    assert fast.add(none, none).shape == (0, 32)
    assert fast.silu_mul(none).shape == (0, 16)


def test_unreadable_tensors_raise_an_error(device):
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        fast.rms_norm(torch.ones(8, 4, device=device).T, torch.ones(8, device=device), 1e-5)
    for call in (fast.silu_mul, lambda rows: fast.add(rows, rows)):
        with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
            call(torch.ones(4, 16, device=device)[:, ::2])
