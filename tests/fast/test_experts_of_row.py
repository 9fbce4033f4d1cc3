"""Experts of a single row, against the kernels for any number of rows."""

import pytest
import torch

from specsim.core.target import Experts
from specsim.fast.model.experts import ExpertWeights, expert_blocks, experts_residual
from specsim.fast.model.experts_of_row import routed_row_residual
from specsim.fast.model.routing import route
from specsim.fast.model.rows import Norm

CHOICES = [
    Experts(4, 2, 8, normalise=True),
    Experts(6, 3, 20, "softmax_of_top", activation="clamped"),
    Experts(16, 3, 17, "grouped_sigmoid", True, 4, 2, 2.5),
    Experts(40, 8, 9),
    Experts(5, 1, 40),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [16, 70])
@pytest.mark.parametrize("experts", CHOICES, ids=lambda experts: experts.routing)
def test_a_row_gets_what_it_gets_among_others(experts, hidden, dtype, device):
    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype).to(device)

    count, size = experts.num_experts, experts.size
    weights = ExpertWeights(random(count, 2 * size, hidden), random(count, hidden, size))
    if experts.activation == "clamped":
        weights = weights._replace(gate_up_bias=random(count, 2 * size), down_bias=random(count, hidden))
    x, base = 3 * random(1, hidden), random(1, hidden)
    logits = (2 * torch.randn(1, count, device=device)).round()  # equal ones among them
    bias = 0.3 * torch.randn(count, device=device) if experts.routing == "grouped_sigmoid" else None
    norm = Norm(random(hidden), 1e-5)
    rows, chosen = routed_row_residual(base, x, weights, experts, logits, bias, norm)
    routes = route(logits, experts, bias)
    assert torch.equal(chosen, routes.experts)
    blocks = expert_blocks(routes.experts, count, 16)
    expected = experts_residual(base, x, weights, routes, blocks, experts.activation, norm)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(rows.values, expected.values, rtol=eps, atol=eps)
    torch.testing.assert_close(rows.weighted, expected.weighted, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(rows.squares.sum(-1), rows.values.float().square().sum(-1))


def test_a_logit_that_is_no_number_is_chosen_last(device):
    experts = Experts(5, 4, 8, "softmax_of_top")
    weights = ExpertWeights(torch.randn(5, 16, 16, device=device), torch.randn(5, 16, 8, device=device))
    x = torch.randn(1, 16, device=device)
    logits = torch.tensor([[torch.nan, 0.0, -torch.inf, 5.0, 0.0]], device=device)
    _, chosen = routed_row_residual(x, x, weights, experts, logits, None)
    assert chosen.tolist() == [[3, 1, 4, 0]]


def test_the_row_may_lie_in_a_wider_tensor(device):
    experts = CHOICES[0]
    weights = ExpertWeights(torch.randn(4, 16, 16, device=device), torch.randn(4, 16, 8, device=device))
    wide, x = torch.zeros(1, 48, device=device), torch.randn(1, 16, device=device)
    rows, _ = routed_row_residual(
        wide[:, :16], x, weights, experts, torch.randn(1, 4, device=device), None, out=wide[:, 16:32]
    )
    assert rows.values.data_ptr() == wide[:, 16:].data_ptr()
    assert wide[:, 16:32].any()
    assert not wide[:, :16].any()
    assert not wide[:, 32:].any()
