"""Ranks of a group: gathered parts, and states that differ."""

from functools import partial
from typing import NamedTuple

import pytest
import torch

from specsim import InputError
from specsim.core.phases import AutoregressiveInput
from specsim.core.rank_group import PhaseBoard, RankGroup, RanksDiffer


def _gathered(dtype, ranks) -> torch.Tensor:
    part = torch.arange(6).reshape(2, 3).to(dtype) + 10 * ranks.rank
    out = part.new_empty(2, 2, 3)
    ranks.gather(part, out)
    return out.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_rank_gathers_all_parts_in_order(in_ranks, dtype):
    first, second = in_ranks(partial(_gathered, dtype))
    expected = torch.arange(6.0).reshape(2, 3).double()
    assert torch.equal(first, second)
    assert torch.equal(first, torch.stack([expected, expected + 10]))


class Both(NamedTuple):
    """States as a round returns them."""

    first: AutoregressiveInput
    draft_input: AutoregressiveInput


def _compared(changes, is_round, ranks) -> str:
    state = AutoregressiveInput.zeros(2, 2, 4)
    if changes and ranks.rank == 1:
        state.topk_index[1, 0] = 1
    try:
        ranks.require_equal("draft", Both(AutoregressiveInput.zeros(2, 2, 4), state) if is_round else state)
    except RanksDiffer as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("is_round", [False, True])
def test_a_state_that_differs_is_named_with_its_rank(in_ranks, is_round):
    assert in_ranks(partial(_compared, False, is_round)) == ["equal", "equal"]
    said = in_ranks(partial(_compared, True, is_round))
    assert said[0] == said[1]
    assert all(word in said[0] for word in ("rank 1", "topk_index", "draft"))
    assert ("draft_input.topk_index" in said[0]) == is_round


def test_what_has_no_tensors_is_not_equal():
    with pytest.raises(TypeError):
        RankGroup(0, 2, PhaseBoard()).require_equal("draft", [torch.zeros(2)])


def test_a_size_without_such_ranks_raises():
    assert RankGroup.joined(1) is None
    with pytest.raises(InputError, check=lambda error: error.name == "tensor_parallel"):
        RankGroup.joined(2)
