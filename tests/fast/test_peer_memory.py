"""Exchanges through memory that two ranks see: parts in order, halves that alternate, sums as those of a library."""

import time
from functools import partial

import pytest
import torch

from specsim.core.rank_group import PhaseBoard, RankGroup
from specsim.fast.model.rank_sums import exchanged_sum, sum_residual
from specsim.fast.model.rows import HiddenRows, Norm
from specsim.fast.runtime import peer_memory
from specsim.fast.runtime.peer_memory import PROGRAMS, LinkedRanks, PeerMemory, join_slices, meet, without_padding

HALF = 4096  # bytes


@pytest.fixture
def memory():
    """Make memory that three processes share, as a sum over two does not depend on their order."""
    size = PeerMemory.num_bytes(HALF, 3)
    return tuple(torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(3))


def peers_of(memory, rank, most_spins=-1):
    return PeerMemory(memory, rank, memory[0].new_zeros(PROGRAMS, dtype=torch.int32), HALF, most_spins)


def zero_memory(device):
    """Make the memory of two ranks, which this process has alone."""
    size = PeerMemory.num_bytes(HALF, 2)
    return tuple(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))


def _gathered(memory, dtype, ranks):
    """Exchange parts of several sizes, rank 1 always later than rank 0, which writes its next part meanwhile."""
    peers = peers_of(memory, ranks.rank)
    found = []
    for size in (1, 3, 16, 511, 8):
        time.sleep(0.02 * ranks.rank)
        part = (torch.arange(size) + 10 * ranks.rank).to(dtype)
        out = torch.empty(2, size, dtype=dtype)
        peers.gather(part, out)
        found.append(out)
    return found


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.uint8])
def test_both_ranks_gather_all_parts_in_order(in_ranks, memory, dtype):
    for found in in_ranks(partial(_gathered, memory[:2], dtype)):
        for out in found:
            size = out.shape[1]
            expected = torch.stack([(torch.arange(size) + 10 * rank).to(dtype) for rank in range(2)])
            assert torch.equal(out, expected)


def _summed(memory, inputs, ranks):
    """Sum over ranks by the library and through the shared memory, on to a base and under a norm."""
    peers = peers_of(memory, ranks.rank)
    found = []
    for base, norm, *parts in inputs:
        part = parts[ranks.rank]
        library = sum_residual(ranks, base, part, norm)
        ours = HiddenRows.to_write(torch.empty_like(part), norm, 1)
        time.sleep(0.02 * ranks.rank)
        exchanged_sum(peers, base, part, ours)
        found.append((library, ours))
    return [(each.values, each.weighted, each.squares) for both in found for each in both]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_a_library(in_ranks, memory, dtype):
    """One row, more rows than programs, and a base or none."""
    inputs = []
    for rows, size, has_base in ((1, 7, True), (PROGRAMS + 5, 5, False), (3, 37, True)):
        base, *parts = (torch.randn(rows, size).to(dtype) for _ in range(4))
        norm = Norm(torch.randn(size).to(dtype), 1e-5)
        inputs.append((base if has_base else None, norm, *parts))
    first, *others = in_ranks(partial(_summed, memory, inputs), size=3)
    for library, ours in zip(first[::2], first[1::2], strict=True):
        assert all(torch.equal(*each) for each in zip(library, ours, strict=True))
    for other in others:
        assert all(torch.equal(*each) for sums in zip(first, other, strict=True) for each in zip(*sums, strict=True))


def test_a_rank_that_may_give_up_does_not_hang(device):
    """Nobody raises the flags of the other rank, so what is read is wrong."""
    out = torch.empty(2, 3, device=device)
    peers_of(zero_memory(device), 0, most_spins=5).gather(torch.ones(3, device=device), out)
    assert out.tolist() == [[1.0] * 3, [0.0] * 3]


def test_the_next_part_goes_to_the_other_half(device):
    """A slower rank may still read the first part when the next one is written."""
    both = zero_memory(device)
    peers = peers_of(both, 0, most_spins=0)
    for value in (1.0, 2.0, 3.0):
        peers.gather(torch.full((2,), value, device=device), torch.empty(2, 2, device=device))
        halves = [float(each) for each in both[0][: 2 * HALF].view(torch.float32)[:: HALF // 4]]
        assert halves[int(value) % 2] == value
    assert halves == [2.0, 3.0]


def _met(ranks):
    return meet(ranks, torch.device("cpu"), HALF)


def test_ranks_without_gpus_do_not_meet(in_ranks):
    assert in_ranks(_met) == ["ranks are on no NVIDIA GPUs"] * 2


def _refused_on_rank_1(ranks):
    peer_memory._none_for = lambda ranks, device: "rank 1 sees nothing" if ranks.rank else ""
    return meet(ranks, torch.device("cpu"), HALF)


def test_every_rank_knows_why_one_sees_no_memory(in_ranks):
    assert in_ranks(_refused_on_rank_1) == ["rank 1 sees nothing"] * 2


def test_only_small_parts_on_gpus_are_linked(memory):
    linked = LinkedRanks(0, 2, PhaseBoard(), peers_of(memory, 0), 8)
    assert not linked.links(torch.zeros(2))
    assert isinstance(linked, RankGroup)
    assert linked.within(7).peers.most_spins == 7


def _joined(logits_RV, ranks):
    size = logits_RV.shape[1]
    tokens = ranks.part.tokens(size)
    padding = ranks.part.chunk(size) - len(tokens)
    own = torch.nn.functional.pad(logits_RV[:, tokens.start : tokens.stop], (0, padding))
    joined = join_slices(ranks, own, size)
    return joined, without_padding(ranks, own, size)[:, len(tokens) :]


@pytest.mark.parametrize("vocab_size", [1, 7, 48, 600])
def test_joined_slices_are_the_row(in_ranks, vocab_size):
    logits = torch.randn(3, vocab_size)
    for joined, padding in in_ranks(partial(_joined, logits)):
        assert torch.equal(joined, logits)
        assert (padding == float("-inf")).all()
