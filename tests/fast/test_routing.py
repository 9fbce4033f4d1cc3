"""Router and experts chosen by the kernel, against the rules written with torch."""

import pytest
import torch

from specsim.core.target import Experts
from specsim.fast.model.routing import normed_and_logits, route
from specsim.fast.model.rows import HiddenRows, Norm

SHAPES = [(1, 4, 1), (5, 8, 2), (7, 20, 3), (40, 128, 8)]  # rows, experts, experts of a row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_weighs_over_all_experts(shape, dtype, device):
    num_rows, num_experts, top_k = shape
    logits = torch.randn(num_rows, num_experts).to(dtype)
    best = logits.float().softmax(-1).sort(descending=True, stable=True)
    routes = route(logits.to(device), Experts(num_experts, top_k, 1))
    assert torch.equal(routes.experts.cpu().long(), best.indices[:, :top_k])
    torch.testing.assert_close(routes.weights.cpu(), best.values[:, :top_k])
    routes = route(logits.to(device), Experts(num_experts, top_k, 1, normalise=True))
    torch.testing.assert_close(routes.weights.sum(-1).cpu(), torch.ones(num_rows))


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_of_top_weighs_over_the_chosen(shape, device):
    num_rows, num_experts, top_k = shape
    logits = torch.randn(num_rows, num_experts)
    best = logits.topk(top_k)
    routes = route(logits.to(device), Experts(num_experts, top_k, 1, "softmax_of_top"))
    assert torch.equal(routes.experts.cpu().long(), best.indices)
    torch.testing.assert_close(routes.weights.cpu(), best.values.softmax(-1))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3), (2, 1)])
def test_groups_limit_the_choice_and_the_bias_no_weight(groups, device):
    count, kept = groups
    logits, bias = torch.randn(9, 16), 0.3 * torch.randn(16)
    score = logits.sigmoid()
    biased = score + bias
    of_group = biased.view(9, count, -1).topk(min(2, 16 // count)).values.sum(-1)
    is_kept = torch.zeros(9, count).scatter(1, of_group.topk(kept).indices, 1).bool().repeat_interleave(16 // count, 1)
    expected = biased.masked_fill(~is_kept, -torch.inf).topk(3).indices
    weights = score.gather(1, expected)
    choice = Experts(16, 3, 1, "grouped_sigmoid", True, count, kept, 2.5)
    routes = route(logits.to(device), choice, bias.to(device))
    assert torch.equal(routes.experts.cpu().long(), expected)
    torch.testing.assert_close(routes.weights.cpu(), 2.5 * weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("routing", ["softmax", "softmax_of_top", "grouped_sigmoid"])
def test_the_lower_of_equal_experts_comes_first(routing, device):
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0, 1.0]])
    routes = route(logits.to(device), Experts(6, 4, 1, routing))
    assert routes.experts.tolist() == [[1, 3, 4, 0]]


def test_logits_that_are_no_numbers_choose_experts_that_exist(device):
    routes = route(torch.full((3, 5), torch.nan, device=device), Experts(5, 2, 1))
    assert ((routes.experts >= 0) & (routes.experts < 5)).all()


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
