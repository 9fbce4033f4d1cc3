"""Merged parts of requests' keys give the softmax over all of them."""

from types import SimpleNamespace

import pytest
import torch

from specsim.fast.model import attention_plan as attention_merge
from specsim.fast.model.attention_plan import AttentionParts, merge

HEADS, GROUP, PAIRS, DIM = 2, 3, 12, 10  # pairs: of at most 4 rows and a group
ROW_STARTS = [0, 4, 5, 8]
SPANS = [(0, 3), (0, 1), (3, 7)]  # the second request is finished
NUM_PARTS = 10


@pytest.fixture
def parts(device) -> AttentionParts:
    """Draw parts whose logits differ by more than the exponents of an f32, with some that see no key."""
    count = NUM_PARTS * HEADS * PAIRS
    top = torch.where(torch.rand(count) < 0.3, -torch.inf, 100 * torch.randn(count))
    total = torch.where(top > -torch.inf, 1 + torch.rand(count), 0.0)
    acc = torch.where(top[:, None] > -torch.inf, torch.randn(count, DIM), 0.0)
    spans = torch.tensor(SPANS, dtype=torch.int32)
    return AttentionParts(*(each.to(device) for each in (acc, torch.stack([top, total], 1), spans)))


def merged(parts: AttentionParts) -> torch.Tensor:
    device = parts.acc.device
    out = torch.full((ROW_STARTS[-1], HEADS * GROUP, DIM), 7.0, device=device)
    plan = SimpleNamespace(group=GROUP, pairs=PAIRS, block_d=16, units=NUM_PARTS)
    merge(out, parts, SimpleNamespace(row_starts=torch.tensor(ROW_STARTS, device=device)), plan)
    return out.cpu()


def expected(parts: AttentionParts) -> torch.Tensor:
    """Compute the same in float64, with the row and head of every pair by hand."""
    acc = parts.acc.cpu().double().view(NUM_PARTS, HEADS, PAIRS, DIM)
    top, total = parts.stats.cpu().double().view(NUM_PARTS, HEADS, PAIRS, 2).unbind(-1)
    out = torch.full((ROW_STARTS[-1], HEADS, GROUP, DIM), 7.0, dtype=torch.float64)
    for request, (first, count) in enumerate(SPANS):
        low, high = ROW_STARTS[request], ROW_STARTS[request + 1]
        own = slice(first, first + count)
        weight = (top[own] - top[own].amax(0).clamp(min=-1e9)).exp2()  # [parts, heads, pairs]
        sums = (total[own] * weight).sum(0).clamp(min=1e-30)
        result = (acc[own] * weight[..., None]).sum(0) / sums[..., None]
        if count > 1:
            num_rows = high - low
            out[low:high] = result[:, : num_rows * GROUP].unflatten(1, (num_rows, GROUP)).transpose(0, 1)
    return out.flatten(1, 2)


def test_merged_parts_are_the_softmax_over_all(parts, program_order):
    torch.testing.assert_close(merged(parts).double(), expected(parts), rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("programs", [1, 24])
def test_parts_merge_to_the_same_bits_with_any_programs(programs, parts, monkeypatch, program_order):
    """There are twelve pairs, and a program of a GPU merges one at a time."""
    monkeypatch.setattr(attention_merge, "block_of", lambda count, on_gpu, others=1: on_gpu)
    out = merged(parts)
    monkeypatch.setattr(attention_merge, "MOST_MERGES", programs)
    assert torch.equal(merged(parts), out)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 10])
def test_parts_of_a_single_request_merge_as_in_a_batch(num_splits, parts, monkeypatch, program_order):
    """Parts beyond its own may have any values. A request of one part is left alone."""

    def merged_with(spans: list[tuple[int, int]], row_starts: list[int], read: AttentionParts) -> torch.Tensor:
        monkeypatch.setattr(f"{__name__}.ROW_STARTS", row_starts)
        device = parts.acc.device
        return merged(read._replace(spans=torch.tensor(spans, dtype=torch.int32, device=device)))

    in_batch = merged_with([(0, num_splits), (0, 1)], [0, 4, 5], parts)[:4]
    acc, stats = parts.acc.clone(), parts.stats.clone()
    own = num_splits * HEADS * PAIRS if num_splits > 1 else 0
    acc[own:], stats[own:] = torch.nan, torch.nan
    solo = merged_with([(0, num_splits)], [0, 4], AttentionParts(acc, stats, parts.spans))
    assert torch.equal(solo, in_batch)
    assert (solo == 7).all() == (num_splits == 1)
