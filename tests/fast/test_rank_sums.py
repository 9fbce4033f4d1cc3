"""Sums over ranks in their order, with the next norm prepared, and the choice of the links between them."""

from functools import partial
from typing import Any

import pytest
import torch

from specsim.core.rank_group import PhaseBoard, RankGroup
from specsim.fast.model import rank_sums as rank_links
from specsim.fast.model.rank_sums import Links, LinkTime, linked, measured, sum_residual
from specsim.fast.model.rows import HiddenRows, Norm, embed
from specsim.fast.runtime.graph import Tape
from specsim.fast.runtime.peer_memory import PeerMemory

MEMORY = PeerMemory((), 0, torch.zeros(0), 8)
TIMES = (LinkTime(8, 5.0, 3.0, True), LinkTime(16, 6.0, 6.0, True), LinkTime(32, 7.0, 9.0, True))


def _summed(parts, base, norm, ranks):
    out = torch.empty(len(parts[0]), 2 * parts[0].shape[1], dtype=parts[0].dtype)[:, : parts[0].shape[1]]
    onto = sum_residual(ranks, base, parts[ranks.rank], Norm(norm, 1e-5), out)
    return onto.values.clone(), onto.normed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("size", [1, 37, 256])
def test_a_sum_is_taken_in_the_order_of_the_ranks(in_ranks, dtype, has_base, size):
    parts = [torch.randn(5, size, dtype=dtype) for _ in range(3)]  # a sum of two does not depend on the order
    base = torch.randn(5, size, dtype=dtype) if has_base else None
    norm = torch.randn(size, dtype=dtype)
    first, *others = in_ranks(partial(_summed, parts, base, norm), size=3)
    assert all(torch.equal(*both) for other in others for both in zip(first, other, strict=True))
    total = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    assert torch.equal(first[0], total if base is None else (base.float() + total.float()).to(dtype))


def _replayed(ranks):
    part = torch.zeros(2, 3)
    out = torch.empty(2, 3)
    tape = Tape.of(lambda: sum_residual(ranks, None, part, None, out))
    part.fill_(1.0 + ranks.rank)
    tape.replay()
    return out


def test_a_replayed_graph_gathers_again(in_ranks):
    for out in in_ranks(_replayed):
        assert torch.equal(out, torch.full((2, 3), 3.0))


def test_a_slice_of_a_table_has_zeros_for_other_tokens(device):
    table = torch.randn(8, 5, device=device)
    ids = torch.tensor([0, 3, 4, 7], device=device)
    rows = embed(ids, table[4:].contiguous(), first_token=4).values
    assert torch.equal(rows, torch.where((ids >= 4)[:, None], table[ids], 0.0))


def test_the_other_way_is_taken_up_to_where_it_is_slower():
    assert Links(MEMORY, TIMES).most_bytes == 16
    assert Links(MEMORY, (*TIMES, LinkTime(64, 9.0, 1.0, True))).most_bytes == 16
    assert Links(MEMORY, TIMES[2:]).most_bytes == 0
    assert Links(MEMORY).most_bytes == 0
    assert Links("no such memory", TIMES).most_bytes == 0


@pytest.mark.parametrize("place", range(3))
def test_nothing_is_linked_where_a_sum_differs(place):
    times = list(TIMES)
    times[place] = times[place]._replace(is_equal=False)
    links = Links(MEMORY, tuple(times))
    assert links.reason
    assert links.most_bytes == 0


def _measured(ranks):
    """Measure with made-up times, rank 1 slower, and a sum of 16 rows that is wrong on rank 1."""
    peers = RankGroup(ranks.rank, ranks.size, PhaseBoard())
    module: Any = rank_links
    module.ROWS = (1, 4, 16, 64)
    module.sum_residual = lambda way, base, part: HiddenRows(
        part + float(len(part) == 16 and way is peers and ranks.rank)
    )
    module._time = lambda way, part: 2.0 * len(part) + ranks.rank + (way is peers)
    return measured(ranks, peers, torch.device("cpu"))


def test_ranks_agree_on_times_and_on_a_sum_that_differs(in_ranks):
    first, second = in_ranks(_measured)
    assert repr(first) == repr(second)
    size = 2 * rank_links.WIDTH
    assert first[:2] == (LinkTime(size, 3.0, 4.0, True), LinkTime(4 * size, 9.0, 10.0, True))
    assert [(each.num_bytes, each.is_equal) for each in first[2:]] == [(16 * size, False)]


def test_ranks_of_a_cpu_stay_as_they_are():
    ranks = RankGroup(0, 2, PhaseBoard())
    assert linked(ranks, torch.device("cpu")) is ranks
    assert linked(None, torch.device("cpu")) is None


@pytest.mark.parametrize("most_bytes", [16, 0])
def test_ranks_are_linked_only_where_some_size_is_faster(most_bytes, monkeypatch):
    ranks = RankGroup(0, 2, PhaseBoard())
    monkeypatch.setattr(rank_links, "links", lambda size: Links(MEMORY, TIMES if most_bytes else TIMES[2:]))
    group = linked(ranks, torch.device("cuda"))
    assert (group is ranks) == (most_bytes == 0)
    assert getattr(group, "most_bytes", 0) == most_bytes
