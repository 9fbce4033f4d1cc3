"""Exchanges through the memory of other ranks: parts in order, and halves that alternate."""

import pytest
import torch

from specsim.core.phase_board import PhaseBoard
from specsim.core.rank_group import RankGroup
from specsim.fast.model import rank_sums
from specsim.fast.model.rank_sums import sum_onto
from specsim.fast.runtime.peer_memory import LinkedRanks, PeerMemory, meet

HALF = 256  # bytes


def two_ranks():
    """Make the memory of two ranks as each of them sees it, in one process."""
    memory = tuple(torch.full((2 * HALF,), 255, dtype=torch.uint8) for _ in range(2))
    epochs = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    return [PeerMemory(memory, rank, lambda: None, epochs[rank]) for rank in range(2)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_parts_are_gathered_in_the_order_of_the_ranks(dtype, size):
    """Both ranks put their part before either takes them, as a barrier guarantees."""
    ranks = two_ranks()
    for exchange in range(3):
        parts = [torch.arange(size).to(dtype) + 10 * rank + exchange for rank in range(2)]
        outs = [torch.empty(2, size, dtype=dtype) for _ in range(2)]
        for peers, part in zip(ranks, parts, strict=True):
            peers.put(part)
        for peers, part, out in zip(ranks, parts, outs, strict=True):
            peers.gather(part, out)
            assert torch.equal(out, torch.stack(parts))


def test_a_part_outlives_the_next_exchange_of_a_faster_rank():
    """Rank 1 still reads when rank 0 already writes its next part, which goes to the other half."""
    first, second = two_ranks()
    first.put(torch.tensor([1.0]))
    second.put(torch.tensor([2.0]))
    out = torch.empty(2, 1)
    first.gather(torch.tensor([1.0]), out)  # rank 0 ends its exchange
    first.put(torch.tensor([3.0]))
    parts = second.parts(torch.float32)
    epoch = int(second.epochs[0])
    assert [float(part[(epoch & 1) * parts.half]) for part in parts.of_rank] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_a_library(monkeypatch, dtype):
    """The same bits, base and all, in exchange after exchange."""
    memories = two_ranks()
    board = PhaseBoard()
    monkeypatch.setattr(LinkedRanks, "links", lambda *_: True)
    for _ in range(3):
        base, *parts = (torch.randn(5, 7).to(dtype) for _ in range(3))
        for peers, part in zip(memories, parts, strict=True):
            peers.put(part)
        found = []
        for rank, peers in enumerate(memories):
            monkeypatch.setattr(rank_sums, "parts_of", lambda _, __, peers=peers: peers.parts(dtype))
            linked = LinkedRanks(rank, 2, board, peers, HALF)
            found.append(sum_onto(linked, base, parts[rank]).values)
        total = (parts[0].float() + parts[1].float()).to(dtype)
        for values in found:
            assert torch.equal(values, (base.float() + total.float()).to(dtype))


def _met(ranks):
    return meet(ranks, torch.device("cpu"), HALF)


def test_ranks_without_gpus_do_not_meet(in_two_ranks):
    assert in_two_ranks(_met) == ["ranks are on no NVIDIA GPUs"] * 2


def test_only_small_parts_on_gpus_are_linked():
    linked = LinkedRanks(0, 2, PhaseBoard(), two_ranks()[0], 8)
    assert not linked.links(torch.zeros(2))
    assert isinstance(linked, RankGroup)
