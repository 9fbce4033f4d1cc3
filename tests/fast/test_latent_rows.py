"""Keys and rotated queries of latent attention, against complex products."""

import pytest
import torch

from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.rows import Norm
from specsim.fast.targets.latent_attention import write_latent


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
