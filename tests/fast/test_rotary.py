"""Rotary embedding of the fast implementation, from projection to KV, against the reference."""

import math
from types import SimpleNamespace

import pytest
import torch

from specsim.core.kv_buffer import KVFormat
from specsim.core.pool import KVBuffer, KVLayout
from specsim.fast.model import rotary
from specsim.models.synthetic_pair import LLAMA3
from specsim.models.tiny_config import tiny_config
from specsim.reference.layers import inverse_frequencies, rms_norm, rotate


def assert_within(out: torch.Tensor, exact: torch.Tensor, roundings: int, scale: torch.Tensor | float = 1.0) -> None:
    """Check the error from float64, in units of rounding an element of that scale to the type."""
    units = roundings * torch.finfo(out.dtype).eps
    assert ((out.cpu().double() - exact).abs() <= units * exact.abs().clamp(min=scale)).all()


ROTATIONS = {
    "default": {},
    "llama3": {"rope_scaling": LLAMA3},
    "one key head": {"num_kv_heads": 1},
    "three heads": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 10},
    "head dim 80": {"head_dim": 80, "num_heads": 2},
    "head dim 2": {"head_dim": 2},
}


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", ROTATIONS.values(), ids=ROTATIONS)
def test_fast_rotation_norms_rotates_and_writes_as_the_reference(changes, dtype, normed, device, program_order):
    """Dropped rows write nothing.

    No slot of another row or layer changes.
    """
    config = tiny_config(**changes)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    positions, slots = torch.tensor([0, 1, 2, 63, 500, 0, 511]), torch.tensor([4, 8, 0, -1, 9, -1, 3])
    qkv, norms = torch.randn(7, (heads + 2 * kv_heads) * dim).to(dtype), torch.randn(2, dim).to(dtype)
    kv = KVBuffer(KVLayout(2, kv_heads, dim), 10, dtype, device)
    kv.keys.fill_(math.nan)
    kv.values.fill_(math.nan)
    inverse, eps = rotary.inverse_frequencies(config.rope), config.rms_norm_eps
    assert torch.equal(inverse, inverse_frequencies(config.rope))
    turns = rotary.rotations(positions.to(device), inverse.to(device), dtype)
    forward = rotary.ForwardContext(turns, SimpleNamespace(slots=slots.to(device)), kv)
    head_norms = rotary.HeadNorms(*norms.to(device)) if normed else None
    out = rotary.rotate_and_write(qkv.to(device), head_norms, eps, forward, 1, heads)
    query, key, value = qkv.view(7, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    expected, wide = KVBuffer(KVLayout(2, kv_heads, dim), 10, torch.float64), [query.double(), key.double()]
    expected.keys.fill_(math.nan)
    expected.values.fill_(math.nan)
    if normed:
        wide = [rms_norm(heads_RAD, norm.double(), eps) for heads_RAD, norm in zip(wide, norms, strict=True)]
    # Checkpoints were trained with the float32 cosine of a float32 angle; here it counts as exact.
    query, key = (rotate(heads_RAD, positions, inverse) for heads_RAD in wide)
    expected.write(1, slots, key, value.double())
    scale = max(float(each.abs().max()) for each in wide)
    assert_within(out, query, 4, scale)
    assert torch.equal(kv.keys.cpu().isnan(), expected.keys.isnan())
    written = ~expected.keys.isnan()
    assert_within(kv.keys.cpu()[written], expected.keys[written], 4, scale)
    assert torch.equal(kv.values.cpu().double().nan_to_num(7.0), expected.values.nan_to_num(7.0))


def test_keys_and_values_are_rounded_to_fp8_once(device):
    """Compare the stored numbers with those that the reference stores of rotated keys and of values."""
    formats = KVFormat("fp8_e4m3", 0.25, 0.125)
    kv, wide, expected = (
        KVBuffer(KVLayout(1, 2, 16), 8, torch.float32, where, stored_as)
        for where, stored_as in ((device, formats), (device, KVFormat()), ("cpu", formats))
    )
    slots, qkv = torch.tensor([5, -1, 2]), torch.randn(3, 8 * 16)
    qkv[0, -3:] = 1e4  # beyond the largest number
    turns = rotary.rotations(torch.tensor([0, 3, 9], device=device), torch.rand(8, device=device), torch.float32)
    for each in (kv, wide):
        forward = rotary.ForwardContext(turns, SimpleNamespace(slots=slots.to(device)), each)
        rotary.rotate_and_write(qkv.to(device), None, 0.0, forward, 0, 4)
    rows = torch.tensor([5, 2])
    expected.write(0, rows, wide.keys[0, rows].cpu(), wide.values[0, rows].cpu())
    for name in ("keys", "values"):
        ours, theirs = (getattr(each, name)[0, rows].cpu().view(torch.uint8) for each in (kv, expected))
        assert torch.equal(ours, theirs)
    keys, values = expected.read(0, rows, torch.float64)
    assert values.abs().max() == 448 * 0.125
    assert (keys - wide.keys[0, rows].cpu()).abs().max() <= wide.keys[0, rows].abs().max().cpu() / 16
