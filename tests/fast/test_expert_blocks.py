"""Blocks hold every pair of a row and an expert once, gathered by expert."""

import pytest
import torch

from specsim.fast.model.experts import block_size, expert_blocks


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
