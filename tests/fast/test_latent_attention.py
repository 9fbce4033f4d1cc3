"""Latent attention: products of heads with their own weights, and keys and rotated queries that one launch writes."""

import pytest
import torch

from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.rows import Norm
from specsim.fast.runtime.launch import INTERPRETED
from specsim.fast.targets.latent_attention import head_product, write_latent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 16, 16), (5, 3, 20, 12), (70, 2, 9, 33), (0, 2, 16, 16)])
def test_each_head_meets_its_own_weight(shape, dtype, device):
    """x and out are slices of wider tensors, and the weight is read both ways round."""
    num_rows, heads, size, inner = shape
    x = torch.randn(num_rows, heads, inner + 3).to(dtype)
    weight = torch.randn(heads, size, inner).to(dtype)
    expected = torch.einsum("rak,ank->ran", x[..., :inner].double(), weight.double())
    for stored in (weight.to(device), weight.transpose(1, 2).contiguous().to(device).transpose(1, 2)):
        out = torch.full((num_rows, heads, size + 5), torch.nan, dtype=dtype, device=device)
        head_product(x.to(device)[..., :inner], stored, out[..., :size])
        assert torch.allclose(out[..., :size].cpu().double(), expected, atol=inner * torch.finfo(dtype).eps, rtol=0.01)
        assert out[..., size:].isnan().all()


def test_a_row_depends_on_no_other(device):
    """A row has the same bits solo and among 40.

    The interpreter's products add in another order, so there the sums are exact in any order.
    """
    x, weight = torch.randn(40, 2, 16, device=device), torch.randn(2, 8, 16, device=device)
    if INTERPRETED:
        x, weight = ((each * 8).round() / 8 for each in (x, weight))
    whole, one = torch.empty(40, 2, 8, device=device), torch.empty(1, 2, 8, device=device)
    head_product(x, weight, whole)
    head_product(x[7:8], weight, one)
    assert torch.equal(whole[7:8], one)


def test_channels_that_are_not_adjacent_are_refused(device):
    x = torch.empty(2, 8, 2, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match="allowed: 1 along the last dimension"):
        head_product(x, torch.empty(2, 4, 8, device=device), torch.empty(2, 2, 4, device=device))


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8, 2), (5, 3, 20, 6), (9, 2, 16, 8)])
def test_latents_are_normalised_and_pairs_rotated(shape, dtype, device):
    num_rows, heads, rank, width = shape
    latent = torch.randn(num_rows, rank + width).to(dtype)
    projected = torch.randn(num_rows, heads, 4 + width).to(dtype)
    angle = torch.randn(num_rows, width // 2, dtype=torch.float64)
    turns = torch.stack([angle.cos(), angle.sin()], dim=1).to(dtype)
    slots = torch.randperm(20)[:num_rows]
    slots[-1:] = -1
    norm = Norm(torch.rand(rank).to(dtype).to(device), 1e-6)
    keys = torch.full((20, 1, rank + width), torch.nan, dtype=dtype, device=device)
    query = torch.full((num_rows, heads, rank + width), torch.nan, dtype=dtype, device=device)
    there = projected.to(device)[..., 4:]
    write_latent(
        query[..., rank:],
        KVTensors(keys, None, 1.0, 1.0),
        there,
        latent.to(device),
        norm,
        turns.to(device),
        slots.to(device),
    )
    eps = 16 * torch.finfo(dtype).eps
    expected = turned(projected[..., 4:], angle[:, None])
    assert torch.allclose(query[..., rank:].cpu().double(), expected, atol=eps, rtol=eps)
    assert query[..., :rank].isnan().all()
    wide = latent[:, :rank].double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.cpu().double()
    expected = torch.cat([normed, turned(latent[:, rank:], angle)], dim=-1)
    for row, slot in enumerate(slots.tolist()[:-1]):
        assert torch.allclose(keys[slot, 0].cpu().double(), expected[row], atol=eps, rtol=eps)
    unwritten = [slot for slot in range(20) if slot not in slots[:-1].tolist()]
    assert keys[unwritten].isnan().all()
