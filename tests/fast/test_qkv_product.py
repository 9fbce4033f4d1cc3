"""Fused projection of queries, keys and values against the projection, the rotation and the write."""

import math
from types import SimpleNamespace

import pytest
import torch

from specsim.core.pool import KVBuffer, KVLayout
from specsim.fast import layers
from specsim.fast.model import rotary
from specsim.fast.model.product_plan import ProductTiling
from specsim.fast.model.rows import HiddenRows, Norm
from specsim.models.tiny_config import tiny_config


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"num_kv_heads": 1, "head_dim": 64}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_projection_equals_projection_and_rotation(changes, dtype, device, program_order, monkeypatch):
    """Rows are normalised, and some write nothing.

    No slot of another row or layer changes.
    """
    config = tiny_config(**changes)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    width, norm = (heads + 2 * kv_heads) * dim, Norm(torch.randn(32).to(dtype).to(device), 1e-5)
    tensors = {"qkv_proj.weight": (torch.randn(width, 32) / 6).to(dtype).to(device)}
    if config.heads.bias:
        tensors["qkv_proj.bias"] = torch.randn(width).to(dtype).to(device)
    x = torch.randn(5, 32).to(dtype).to(device)
    rows = HiddenRows(x, norm, x * norm.weight, x.float().square().sum(1, keepdim=True))
    positions = torch.tensor([0, 3, 63, 500, 7], device=device)
    metadata = SimpleNamespace(slots=torch.tensor([4, 8, -1, 9, 3], device=device))
    turns = rotary.rotations(positions, rotary.inverse_frequencies(config.rope).to(device), dtype)
    left = []
    for tiling in (ProductTiling(16, 32, 32, 2), None):
        monkeypatch.setattr("specsim.fast.model.linear.choose", lambda *_, tiling=tiling: tiling)
        kv = KVBuffer(KVLayout(2, kv_heads, dim), 10, dtype, device)
        kv.keys.fill_(math.nan)
        kv.values.fill_(math.nan)
        query = layers._queries(rows, layers.Weights(tensors), config, 1, rotary.ForwardContext(turns, metadata, kv))
        left.append((query, kv.keys, kv.values))
    assert int(left[0][1].isfinite().all((-1, -2)).sum()) == 4
    for fused, apart in zip(*left, strict=True):
        assert torch.equal(fused.isnan(), apart.isnan())
        most = 8 * torch.finfo(dtype).eps * float(apart.nan_to_num().abs().max())
        torch.testing.assert_close(fused.nan_to_num(), apart.nan_to_num(), rtol=0, atol=most)
