"""The norm and the router's logits in one kernel, against the norm's own kernel and float64."""

import pytest
import torch

from specsim.fast.model.routing import normed_and_logits
from specsim.fast.model.rows import HiddenRows, Norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 16), (5, 6, 24), (16, 32, 70)])
def test_rows_under_their_norm_and_logits(shape, has_bias, dtype, device):
    num_rows, num_experts, size = shape
    wide = torch.randn(num_rows, 2 * size).to(dtype).to(device)
    norm = Norm(torch.rand(size).to(dtype).to(device), 1e-5)
    rows = HiddenRows(wide[:, size:], norm)
    weight = torch.randn(num_experts, size, device=device)
    bias = torch.randn(num_experts, device=device) if has_bias else None
    x, logits = normed_and_logits(rows, weight, bias)
    assert torch.equal(x, rows.normed())
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_under_no_norm_stay_as_they_are(device):
    x, weight = torch.randn(3, 20, device=device), torch.randn(4, 20, device=device)
    same, logits = normed_and_logits(HiddenRows(x), weight, None)
    assert torch.equal(same, x)
    torch.testing.assert_close(logits, x @ weight.T, rtol=1e-5, atol=1e-5)
