"""Sums over ranks: in the order of the ranks, onto base rows, with the next norm prepared."""

from functools import partial

import pytest
import torch

from specsim.fast.model.rank_sums import sum_residual
from specsim.fast.model.rows import Norm, embed
from specsim.fast.runtime.graph import Tape


def _summed(parts, base, norm, ranks):
    out = torch.empty(len(parts[0]), 2 * parts[0].shape[1], dtype=parts[0].dtype)[:, : parts[0].shape[1]]
    onto = sum_residual(ranks, base, parts[ranks.rank], Norm(norm, 1e-5), out)
    return onto.values.clone(), onto.normed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("size", [1, 37, 256])
def test_a_sum_is_taken_in_the_order_of_the_ranks(in_two_ranks, dtype, has_base, size):
    parts = [torch.randn(5, size, dtype=dtype) for _ in range(2)]
    base = torch.randn(5, size, dtype=dtype) if has_base else None
    norm = torch.randn(size, dtype=dtype)
    first, second = in_two_ranks(partial(_summed, parts, base, norm))
    assert all(torch.equal(*both) for both in zip(first, second, strict=True))
    total = (parts[0].float() + parts[1].float()).to(dtype)
    assert torch.equal(first[0], total if base is None else (base.float() + total.float()).to(dtype))


def _replayed(ranks):
    part = torch.zeros(2, 3)
    out = torch.empty(2, 3)
    tape = Tape.of(lambda: sum_residual(ranks, None, part, None, out))
    part.fill_(1.0 + ranks.rank)
    tape.replay()
    return out


def test_a_replayed_graph_gathers_again(in_two_ranks):
    for out in in_two_ranks(_replayed):
        assert torch.equal(out, torch.full((2, 3), 3.0))


def test_a_slice_of_a_table_has_zeros_for_other_tokens():
    table = torch.randn(8, 5)
    ids = torch.tensor([0, 3, 4, 7])
    rows = embed(ids, table[4:].contiguous(), first_token=4).values
    assert torch.equal(rows, torch.where((ids >= 4)[:, None], table[ids], 0.0))
