"""Products of few rows, streamed or by a library, within a budget from float64."""

import math

import pytest
import torch
from torch.nn.functional import silu

from specsim.fast.model.linear import linear, linear_gated, linear_residual
from specsim.fast.model.product_plan import ProductTiling
from specsim.fast.model.rows import HiddenRows, Norm, rms_norm, silu_mul
from specsim.fast.runtime.launch import INTERPRETED

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 64, 128), (5, 70, 200), (16, 64, 256), (3, 64, 16), (17, 3, 7), (65, 34, 96)]
TILINGS = [ProductTiling(16, 32, 32, 2), ProductTiling(64, 64, 128, 3)]


def assert_within(out: torch.Tensor, exact: torch.Tensor, roundings: int, scale: torch.Tensor | float = 1.0) -> None:
    """Check the error from float64, in units of rounding an element of that scale to the type."""
    units = roundings * torch.finfo(out.dtype).eps
    assert ((out.cpu().double() - exact).abs() <= units * exact.abs().clamp(min=scale)).all()


def roundings(inner: int, dtype: torch.dtype) -> int:
    """Bound the rounding error of a float32 sum of this many products, and of two conversions to the type."""
    return 2 + math.ceil(inner * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps)


def rows_and_weight(num_rows: int, size: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num_rows, inner).to(dtype), (torch.randn(size, inner) / math.sqrt(inner)).to(dtype)


@pytest.fixture
def tiled(monkeypatch):
    """Stream every product with the given tiling, whatever `choose` returns."""

    def stream_with(tiling: ProductTiling) -> None:
        monkeypatch.setattr("specsim.fast.model.linear.choose", lambda *_: tiling)

    return stream_with


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_rows", "size", "inner"), SIZES)
def test_a_streamed_product_is_the_product(num_rows, size, inner, dtype, tiling, device, tiled, program_order):
    """Tiles may reach beyond the weight or be its only one, and rows come in blocks."""
    tiled(tiling)
    x, weight = rows_and_weight(num_rows, size, inner, dtype)
    bias, rows = torch.randn(size).to(dtype), HiddenRows(x.to(device))
    exact = x.double() @ weight.double().T
    scale = float((x.double().abs() @ weight.double().abs().T).max())
    out = linear(rows, weight.to(device))
    budget = roundings(inner, dtype)
    assert_within(out, exact, budget, scale)
    assert_within(linear(rows, weight.to(device), bias.to(device)), exact + bias.double(), budget, scale)
    assert torch.equal(out, linear(rows, weight.to(device)))


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_rows", "size", "inner"), SIZES)
def test_a_product_is_added_and_prepared_for_the_next_norm(
    num_rows, size, inner, dtype, tiling, device, tiled, program_order
):
    """It is rounded before and after the sum.

    base and out are slices of wider tensors. The parts of the squares add up.
    """
    x, weight = rows_and_weight(num_rows, size, inner, dtype)
    base, wide = torch.randn(num_rows, size + 3).to(dtype), torch.full((num_rows, size + 5), 9.0, dtype=dtype)
    bias, wide, given = torch.randn(size).to(dtype).to(device), wide.to(device), base.to(device)[:, 3:]
    norm = Norm(torch.randn(size).to(dtype).to(device), 1e-5)
    tiled(tiling)
    out = linear_residual(
        given, HiddenRows(x.to(device)), weight.to(device), bias, norm=norm, out=wide[:, 2 : size + 2]
    )
    product = linear(HiddenRows(x.to(device)), weight.to(device), bias)
    assert torch.equal(out.values, given + product)
    assert out.values.data_ptr() == wide[:, 2:].data_ptr()
    assert (wide[:, :2] == 9).all()
    assert (wide[:, size + 2 :] == 9).all()
    if dtype == torch.float16:  # a row times a weight may be too large for it
        assert out.weighted is out.squares is None
    else:
        assert torch.equal(out.weighted, out.values * norm.weight)
        assert_within(out.squares.sum(1), out.values.cpu().double().square().sum(1), 4 * size)
    assert linear_residual(given, HiddenRows(x.to(device)), weight.to(device), bias).weighted is None
    tiled(None)
    library = linear_residual(given, HiddenRows(x.to(device)), weight.to(device), bias, norm=norm)
    assert library.norm is norm
    assert library.squares is None
    assert_within(library.values, out.values.cpu().double(), 4, 8.0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_rows", "size", "inner"), SIZES)
def test_a_streamed_gated_product_rounds_as_three_operations(
    num_rows, size, inner, dtype, device, tiled, program_order
):
    x, weight = rows_and_weight(num_rows, 2 * size, inner, dtype)
    bias, tiling = torch.randn(2 * size).to(dtype), ProductTiling(16, 32, 32, 2)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    tiled(tiling)
    out = linear_gated(HiddenRows(x.to(device)), weight.to(device), bias.to(device))
    assert_within(out, silu(gate) * up, 8, float((silu(gate) * up).abs().max()))
    whole = silu_mul(linear(HiddenRows(x.to(device)), weight.to(device), bias.to(device)))
    assert_within(out, whole.cpu().double(), 4, float(whole.abs().max()))


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size", "inner"), SIZES)
def test_a_norm_is_applied_to_the_product(num_rows, size, inner, dtype, parts, device, tiled, program_order):
    """The result is as if rows were normalised, with one rounding less.

    A norm that was not prepared runs its own kernel.
    """
    x, weight = rows_and_weight(num_rows, 2 * size, inner, dtype)
    x *= 8.0 ** (torch.arange(num_rows) % 3 + 1)[:, None].to(dtype)  # rows of one length would hide the norm
    norm = Norm(torch.randn(inner).to(dtype).to(device), 1e-3)
    x, weight, total = x.to(device), weight.to(device), x.double().square().sum(1)
    shares = torch.rand(num_rows, parts, dtype=torch.float64).softmax(1)
    rows = HiddenRows(x, norm, x * norm.weight, (total[:, None] * shares).float().to(device))
    tiled(ProductTiling(16, 32, 32, 2))
    applied = rms_norm(x, *norm)
    exact = x.double() * (x.double().square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    scale = float((exact.abs() @ weight.double().abs().T).max())
    assert_within(linear(rows, weight), (exact @ weight.double().T).cpu(), 1 + roundings(inner, dtype), scale)
    for multiply in (linear, linear_gated):
        expected = multiply(HiddenRows(applied), weight)
        assert_within(multiply(rows, weight), expected.cpu().double(), 8, scale**2)
        assert torch.equal(multiply(HiddenRows(x, norm), weight), expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_is_the_same_solo_and_batched(dtype, device):
    """A row has the same bits solo, among 16, and in the second block of 64.

    The interpreter's products add in another order, so there the sums are exact in any order.
    """
    x, weight = (each.to(device) for each in rows_and_weight(100, 130, 256, dtype))
    if INTERPRETED:
        x, weight = ((each * 8).round() / 8 for each in (x, weight))
    many = linear(HiddenRows(x), weight, batch_invariant=True)
    gated = linear_gated(HiddenRows(x), weight, batch_invariant=True)
    for low, high in ((0, 1), (3, 19), (70, 71), (64, 100), (10, 60)):
        assert torch.equal(linear(HiddenRows(x[low:high]), weight, batch_invariant=True), many[low:high])
        assert torch.equal(linear_gated(HiddenRows(x[low:high]), weight, batch_invariant=True), gated[low:high])


def test_no_rows_and_rows_that_cannot_be_read(device):
    none, weight = HiddenRows(torch.empty(0, 32, device=device)), torch.ones(6, 32, device=device)
    for batch_invariant in (False, True):
        assert linear(none, weight, None, batch_invariant).shape == (0, 6)
        assert linear_gated(none, weight, None, batch_invariant).shape == (0, 3)
        base = torch.empty(0, 6, device=device)
        assert linear_residual(base, none, weight, None, batch_invariant).values.shape == (0, 6)
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        linear(HiddenRows(torch.ones(32, 4, device=device).T), weight, None, True)
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        linear(HiddenRows(torch.ones(3, 32, device=device)), torch.ones(32, 6, device=device).T, None, True)
