"""Ranks of a group: gathered parts, and states that differ."""

from functools import partial

import pytest
import torch

from specsim import InputError
from specsim.core.phases import AutoregressiveInput
from specsim.core.rank_group import RankGroup, RanksDiffer


def _gathered(dtype, ranks) -> torch.Tensor:
    part = torch.arange(6).reshape(2, 3).to(dtype) + 10 * ranks.rank
    out = part.new_empty(2, 2, 3)
    ranks.gather(part, out)
    return out.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_rank_gathers_all_parts_in_order(in_two_ranks, dtype):
    first, second = in_two_ranks(partial(_gathered, dtype))
    expected = torch.arange(6.0).reshape(2, 3).double()
    assert torch.equal(first, second)
    assert torch.equal(first, torch.stack([expected, expected + 10]))


def _compared(changes, ranks) -> str:
    state = AutoregressiveInput.zeros(2, 2, 4)
    if changes and ranks.rank == 1:
        state.topk_index[1, 0] = 1
    try:
        ranks.require_equal("draft", state)
    except RanksDiffer as error:
        return str(error)
    return "equal"


def test_a_state_that_differs_is_named_with_its_rank(in_two_ranks):
    assert in_two_ranks(partial(_compared, False)) == ["equal", "equal"]
    said = in_two_ranks(partial(_compared, True))
    assert said[0] == said[1]
    assert all(word in said[0] for word in ("rank 1", "topk_index", "draft"))


def test_a_size_without_such_ranks_raises():
    assert RankGroup.joined(1) is None
    with pytest.raises(InputError, check=lambda error: error.name == "tensor_parallel"):
        RankGroup.joined(2)
