"""Products with experts' weights, against one expert at a time in float64."""

import pytest
import torch
from torch.nn.functional import silu

from specsim.core.target import Experts
from specsim.fast.model.experts import ExpertWeights, block_size, expert_blocks, experts_residual
from specsim.fast.model.routing import route
from specsim.fast.model.rows import Norm

# Rows, experts, experts of a row, hidden size, width of an expert.
SHAPES = [(1, 4, 2, 16, 8), (5, 8, 3, 24, 20), (40, 3, 2, 70, 33), (0, 4, 2, 16, 8)]


def random_weights(num_experts: int, hidden: int, size: int, has_bias: bool, dtype: torch.dtype) -> ExpertWeights:
    gate_up = (torch.randn(num_experts, 2 * size, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, size) / size**0.5).to(dtype)
    if not has_bias:
        return ExpertWeights(gate_up, down)
    biases = (torch.randn(num_experts, width).to(dtype) for width in (2 * size, hidden))
    return ExpertWeights(gate_up, down, *biases)


def expected_rows(base, x, weights: ExpertWeights, routes, activation: str) -> torch.Tensor:
    out = base.double()
    for row, (experts, shares) in enumerate(zip(routes.experts.tolist(), routes.weights.double().cpu(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            grown = weights.gate_up[expert].double() @ x[row].double()
            grown = grown if weights.gate_up_bias is None else grown + weights.gate_up_bias[expert].double()
            gate, up = grown.chunk(2)
            if activation == "clamped":
                gate = gate.clamp(max=7)
                hidden = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                hidden = silu(gate) * up
            output = weights.down[expert].double() @ hidden
            output = output if weights.down_bias is None else output + weights.down_bias[expert].double()
            out[row] += share * output
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "has_bias"), [("silu", False), ("clamped", True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_gain_their_experts_outputs(shape, activation, has_bias, dtype, device):
    num_rows, num_experts, top_k, hidden, size = shape
    weights = random_weights(num_experts, hidden, size, has_bias, dtype)
    x, base = (torch.randn(num_rows, hidden).to(dtype) for _ in range(2))
    x[:1] *= 20  # beyond the clamp
    routes = route(torch.randn(num_rows, num_experts, device=device), Experts(num_experts, top_k, size, normalise=True))
    blocks = expert_blocks(routes.experts, num_experts, block_size(num_rows * top_k, num_experts))
    moved = ExpertWeights(*(None if each is None else each.to(device) for each in weights))
    norm = Norm(torch.rand(hidden).to(dtype).to(device), 1e-5)
    rows = experts_residual(base.to(device), x.to(device), moved, routes, blocks, activation, norm)
    expected = expected_rows(base, x, weights, routes, activation)
    largest = float(expected.abs().max()) if num_rows else 1.0
    assert torch.allclose(rows.values.cpu().double(), expected, atol=largest * 12 * torch.finfo(dtype).eps, rtol=0)
    torch.testing.assert_close(rows.squares.sum(-1), rows.values.float().square().sum(-1))
    torch.testing.assert_close(rows.weighted, (rows.values.float() * norm.weight.float()).to(dtype))


def test_a_row_depends_on_no_other(device):
    weights = random_weights(6, 32, 16, False, torch.float32)
    weights = ExpertWeights(*(None if each is None else each.to(device) for each in weights))
    x, logits = torch.randn(9, 32, device=device), torch.randn(9, 6, device=device)

    def outputs(rows: slice) -> torch.Tensor:
        routes = route(logits[rows].contiguous(), Experts(6, 2, 16))
        return experts_residual(x[rows], x[rows], weights, routes, expert_blocks(routes.experts, 6, 16), "silu").values

    assert torch.equal(outputs(slice(0, 9))[4:5], outputs(slice(4, 5)))


def chosen_experts(num_rows: int, num_experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(num_rows, num_experts).topk(top_k).indices.short()


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 8, 8), (5, 7, 3), (40, 6, 2), (100, 3, 3), (90, 40, 8)])
def test_every_pair_is_in_one_block_of_its_expert(shape, size, device):
    experts = chosen_experts(*shape)
    blocks = expert_blocks(experts.to(device), shape[1], size)
    owners, flat = blocks.experts.tolist(), experts.flatten().tolist()
    live = [owner for owner in owners if owner >= 0]
    assert live == sorted(live)
    assert owners == live + [-1] * (len(owners) - len(live))
    held = [[pair for pair in block if pair >= 0] for block in blocks.pairs[: len(live)].tolist()]
    assert [pair for block in held for pair in block] == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert all(flat[pair] == owner for owner, block in zip(live, held, strict=True) for pair in block)
    assert len(live) == sum(-(-flat.count(expert) // size) for expert in set(flat))


def test_all_pairs_of_one_expert_fit(device):
    blocks = expert_blocks(torch.full((70, 1), 2, dtype=torch.int16, device=device), 4, 16)
    assert blocks.experts.tolist() == [2] * 5 + [-1] * 3
    assert blocks.pairs[:5].flatten().tolist() == [*range(70), *[-1] * 10]


def test_no_rows_need_no_blocks(device):
    blocks = expert_blocks(torch.empty(0, 2, dtype=torch.int16, device=device), 4, 16)
    assert blocks.experts.tolist() == []


def test_blocks_grow_with_the_pairs_of_an_expert():
    assert [block_size(pairs, 128) for pairs in (0, 8, 1024, 2048, 4096, 10**6)] == [16, 16, 16, 32, 64, 128]
