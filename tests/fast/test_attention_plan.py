"""Plans of attention: parts of requests' keys, tiles of keys by parts, and the merge of parts."""

from types import SimpleNamespace
from typing import NamedTuple, no_type_check

import pytest
import torch
import triton.language as tl

from specsim.fast.model import attention_plan
from specsim.fast.model import attention_plan as attention_merge
from specsim.fast.model.attention_plan import MANY, AttentionParts, KeyPartition, assignment, make_plan, merge, tiles_of
from specsim.fast.runtime.launch import kernel, next_power_of_2

HEADS, GROUP, PAIRS, DIM = 2, 3, 12, 10  # pairs: of at most 4 rows and a group
ROW_STARTS = [0, 4, 5, 8]
SPANS = [(0, 3), (0, 1), (3, 7)]  # the second request is finished
NUM_PARTS = 10


class Lengths(NamedTuple):
    key_lens: torch.Tensor
    num_extras: torch.Tensor


@kernel
@no_type_check
def _assign(out_ptr, length_ptrs, window, num_requests, partition, BLOCK_B: tl.constexpr):
    unit = tl.program_id(0)
    work = assignment(tl.arange(0, BLOCK_B), unit, length_ptrs, window, num_requests, partition)
    tl.store(out_ptr + 5 * unit, work.request)
    tl.store(out_ptr + 5 * unit + 1, work.split)
    tl.store(out_ptr + 5 * unit + 2, work.num_splits)
    tl.store(out_ptr + 5 * unit + 3, work.first_part)
    tl.store(out_ptr + 5 * unit + 4, work.key_len)


def assigned(lengths: list[int], extras: list[int], window: int, partition: KeyPartition) -> list[list[int]]:
    """Apply the rule on lists: every unit's request, part, number of parts, first kept part and prefix."""
    work = [min(length, window) + extra for length, extra in zip(lengths, extras, strict=True)]
    share = max(partition.share, -(-sum(work) // partition.units))
    splits = [min(max(each // share, partition.least), partition.most) for each in work]
    kept = [sum(count for count in splits[:request] if count > 1) for request in range(len(splits))]
    return [
        [request, split, count, kept[request], lengths[request]]
        for request, count in enumerate(splits)
        for split in range(count)
    ]


@pytest.mark.parametrize("window", [MANY, 300])
@pytest.mark.parametrize(
    "partition",
    [
        KeyPartition(128, 12, 1, MANY),
        KeyPartition(128, 2, 1, MANY),
        KeyPartition(256, MANY, 1, 3),
        KeyPartition(1, MANY, 3, 3),
    ],
)
def test_units_are_the_parts_of_requests_in_order(partition, window, device):
    lengths, extras = [1000, 0, 255, 256, 2000, 70], [5, 8, 1, 0, 3, 60]
    tensors = Lengths(*(torch.tensor(each, dtype=torch.int32, device=device) for each in (lengths, extras)))
    num_units = partition.most_units(len(lengths))
    out = torch.empty(num_units, 5, dtype=torch.int32, device=device)
    size = len(lengths)
    _assign[(num_units,)](out, tensors, window, size, partition, BLOCK_B=next_power_of_2(size))
    expected = assigned(lengths, extras, window, partition)
    assert len(expected) <= num_units
    assert out[: len(expected)].tolist() == expected
    assert (out[len(expected) :, 0] >= size).all()


@kernel
@no_type_check
def _tiles(out_ptr, num_splits, first_tile, num_tiles):
    split = tl.program_id(0)
    low, high = tiles_of(split, num_splits, first_tile, num_tiles)
    tl.store(out_ptr + 2 * split, low)
    tl.store(out_ptr + 2 * split + 1, high)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("num_tiles", [0, 1, 4, 5, 13])
def test_parts_share_tiles_evenly_and_in_order(num_splits, num_tiles, device):
    out = torch.empty(num_splits, 2, dtype=torch.int32, device=device)
    _tiles[(num_splits,)](out, num_splits, 3, num_tiles)
    low, high = out.T.tolist()
    assert [3, *high] == [*low, 3 + num_tiles]
    counts = [end - first for first, end in zip(low, high, strict=True)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def plan_of(
    num_requests: int, max_rows: int = 4, has_equal_rows: bool = True, **options
) -> attention_plan.AttentionPlan:
    metadata = SimpleNamespace(num_extras=range(num_requests), max_rows=max_rows, has_equal_rows=has_equal_rows)
    options = dict(splits=None, invariant=False) | options
    return make_plan(torch.empty(num_requests * max_rows, 6, 80), torch.empty(9, 2, 80), 80, metadata, **options)


def test_a_plan_counts_pairs_of_rows_and_query_heads():
    plan = plan_of(17)
    assert (plan.group, plan.pairs, plan.block_d) == (3, 12, 128)
    assert plan.blocks * plan.tiling.block_m >= plan.pairs
    assert [plan_of(size).block_b for size in (0, 1, 2, 16, 17, 256, 257)] == [1, 1, 16, 16, 256, 256, 4096]


def test_keys_are_one_part_where_more_are_not_needed(monkeypatch):
    assert plan_of(3, splits=1).partition is None
    assert plan_of(3, splits=4) == plan_of(3, splits=4)
    assert (plan_of(3, splits=4).units, plan_of(0, splits=4).units) == (12, 0)
    monkeypatch.setattr(attention_plan, "_multiprocessors", lambda _: 2)
    assert plan_of(3).partition is None  # of two heads, each on one multiprocessor
    monkeypatch.setattr(attention_plan, "_multiprocessors", lambda _: 40)
    assert plan_of(3).units == 20 + 3 - 1


@pytest.mark.parametrize("has_equal_rows", [True, False])
def test_an_invariant_plan_ignores_other_requests(has_equal_rows):
    plans = [plan_of(size, has_equal_rows=has_equal_rows, invariant=True) for size in (1, 3, 40)]
    assert len({plan.partition for plan in plans}) == 1
    assert len({plan.tiling for plan in plans}) == 1
    assert (plans[0].partition is None) == (not has_equal_rows)  # many rows would fill the memory


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
