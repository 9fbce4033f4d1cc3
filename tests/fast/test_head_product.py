"""Products of heads with their own weights."""

import pytest
import torch

from specsim.fast.runtime.launch import INTERPRETED
from specsim.fast.targets.latent_attention import head_product


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
