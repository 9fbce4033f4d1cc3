"""Attention against PyTorch's, and the metadata of every phase against key sets built from the contracts."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specsim.core.config import SpecConfig
from specsim.core.phases import VerifyInput
from specsim.core.pool import KVBuffer, KVLayout
from specsim.reference.attention import (
    AttentionMetadata,
    Keys,
    Scores,
    attention,
    causal_metadata,
    lane_metadata,
    tree_metadata,
)

from .trees import make_batch, seen, tree_batch

# Queries of one request, its keys, query heads, key heads, head dim.
SHAPES = [(1, 1, 1, 1, 2), (1, 17, 4, 2, 16), (5, 13, 3, 3, 7), (7, 31, 6, 2, 10), (16, 16, 5, 1, 3)]


def nan_buffer(layers: int, slots: int, heads: int, dim: int) -> KVBuffer:
    buffer = KVBuffer(KVLayout(layers, heads, dim), slots, torch.float64)
    buffer.keys.fill_(math.nan)
    buffer.values.fill_(math.nan)
    return buffer


def random_keys(num_queries: int, num_keys: int, first_slot: int) -> Keys:
    """Make keys in shuffled slots at increasing positions, where every row sees its own last key and random others."""
    mask = torch.rand(num_queries, num_keys) < 0.5
    mask[:, -1] = True
    return Keys(first_slot + torch.randperm(num_keys), torch.arange(num_keys), mask)


def fill_seen(kv: KVBuffer, layer: int, keys: Keys) -> None:
    """Write random KV to the slots that some row sees, and leave NaN in the others."""
    for slot in keys.slots[keys.mask.any(0)].tolist():
        kv.keys[layer, slot] = torch.randn(kv.keys.shape[2:], dtype=torch.float64)
        kv.values[layer, slot] = torch.randn(kv.keys.shape[2:], dtype=torch.float64)


def torch_attention(query_QAD, keys: Keys, mask, kv: KVBuffer, layer: int):
    """Compute PyTorch's attention under an explicit mask, head by head, with zeros instead of NaN where hidden."""
    key_CAD = kv.keys[layer, keys.slots].nan_to_num()
    value_CAD = kv.values[layer, keys.slots].nan_to_num()
    group = query_QAD.shape[1] // key_CAD.shape[1]
    heads = [
        scaled_dot_product_attention(
            query_QAD[None, :, a], key_CAD[None, :, a // group], value_CAD[None, :, a // group], attn_mask=mask
        )[0]
        for a in range(query_QAD.shape[1])
    ]
    return torch.stack(heads, dim=1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("queries", "num_keys", "heads", "kv_heads", "dim"), SHAPES)
def test_attention_equals_pytorchs_under_any_mask(queries, num_keys, heads, kv_heads, dim):
    kv, requests = (
        nan_buffer(2, 3 * num_keys, kv_heads, dim),
        [random_keys(queries, num_keys, first) for first in (0, num_keys)],
    )
    for keys in requests:
        fill_seen(kv, 1, keys)
    query = torch.randn(2 * queries, heads, dim, dtype=torch.float64)
    rows = torch.arange(2 * queries)
    out = attention(query, 1, kv, AttentionMetadata(rows, rows, tuple(requests)), None)
    for keys, query_QAD, out_QAD in zip(requests, query.chunk(2), out.chunk(2), strict=True):
        assert_close(out_QAD, torch_attention(query_QAD, keys, keys.mask, kv, 1))


@pytest.mark.parametrize("window", [1, 2, 5, 12, 13, 100])
def test_a_window_counts_positions_back_from_the_row_itself(window):
    positions = torch.arange(13)
    keys = Keys(torch.randperm(13), positions, positions <= positions[:, None])
    kv, query = nan_buffer(1, 13, 2, 6), torch.randn(13, 4, 6, dtype=torch.float64)
    fill_seen(kv, 0, keys)
    mask = torch.tensor([[row - window < key <= row for key in range(13)] for row in range(13)])
    out = attention(query, 0, kv, AttentionMetadata(positions, keys.slots, (keys,)), Scores(window))
    assert_close(out, torch_attention(query, keys, mask, kv, 0))


@pytest.mark.parametrize("first", [1, 3, 13])
def test_first_columns_stay_visible_beyond_the_window(first):
    positions = torch.arange(13)
    keys = Keys(torch.randperm(13), positions, positions <= positions[:, None])
    kv, query = nan_buffer(1, 13, 2, 6), torch.randn(13, 4, 6, dtype=torch.float64)
    fill_seen(kv, 0, keys)
    mask = torch.tensor([[key <= row and (row - 4 < key or key < first) for key in range(13)] for row in range(13)])
    metadata = AttentionMetadata(positions, keys.slots, (keys,))
    out = attention(query, 0, kv, metadata, Scores(4, first_columns=first))
    assert_close(out, torch_attention(query, keys, mask, kv, 0))


def test_a_window_depends_on_positions_not_on_order_of_keys():
    """Two branches of a tree have the same positions one after the other."""
    positions = torch.tensor([0, 1, 2, 3, 4, 3, 4])
    mask = torch.tensor([[True, True, True, False, False, True, True]])
    keys, kv = Keys(torch.randperm(7), positions, mask), nan_buffer(1, 7, 1, 4)
    fill_seen(kv, 0, keys)
    query = torch.randn(1, 1, 4, dtype=torch.float64)
    out = attention(query, 0, kv, AttentionMetadata(torch.tensor([4]), torch.tensor([0]), (keys,)), Scores(3))
    seen = torch.tensor([[False, False, True, False, False, True, True]])
    assert_close(out, torch_attention(query, keys, seen, kv, 0))


@pytest.mark.parametrize("window", [None, 3])
def test_rows_that_see_nothing_yield_zeros(window):
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[[0, 2]] = False
    keys, kv = Keys(torch.tensor([4, -1, 2, -1, 0]), torch.arange(5), mask), nan_buffer(1, 6, 1, 4)
    keys.mask[:, [1, 3]] = False
    fill_seen(kv, 0, keys)
    query, rows = torch.randn(4, 2, 4, dtype=torch.float64), torch.full((4,), 4)
    out = attention(query, 0, kv, AttentionMetadata(rows, rows, (keys,)), Scores(window))
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 4, dtype=torch.float64))
    assert out[[1, 3]].isfinite().all()
    assert (out[[1, 3]] != 0).any()


def test_no_keys_at_all_yield_zeros():
    empty = torch.empty(0, dtype=torch.int64)
    keys = Keys(empty, empty, torch.empty(2, 0, dtype=torch.bool))
    rows = torch.zeros(2, dtype=torch.int64)
    out = attention(torch.randn(2, 1, 4), 0, nan_buffer(1, 1, 1, 4), AttentionMetadata(rows, rows, (keys,)), None)
    assert torch.equal(out, torch.zeros(2, 1, 4))


@pytest.mark.parametrize("window", [None, 4])
def test_nan_in_slots_that_no_row_sees_never_shows(window):
    """Slots outside the window of every row count as unseen too."""
    positions = torch.arange(9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6] = False
    keys, kv = Keys(torch.randperm(9), positions, mask), nan_buffer(1, 9, 1, 4)
    fill_seen(kv, 0, keys)
    if window:
        kv.keys[0, keys.slots[:4]] = kv.values[0, keys.slots[:4]] = math.nan
    rows = torch.full((2,), 8 if window is None else 7)
    out = attention(
        torch.randn(2, 1, 4, dtype=torch.float64), 0, kv, AttentionMetadata(rows, rows, (keys,)), Scores(window)
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_causal_row_sees_every_column_up_to_its_own(shuffled_pools, page_size):
    starts, counts = [0, 5, 8, 3], [6, 1, 3, 0]
    pools, rows = shuffled_pools(page_size, [start + count for start, count in zip(starts, counts, strict=True)])
    table = pools.req_to_token.tolist()
    stood = [(r, start + j) for r, start, count in zip(rows, starts, counts, strict=True) for j in range(count)]
    slots = torch.tensor([table[row][column] for row, column in stood])
    row_starts = torch.tensor([0, 6, 7, 10, 10])
    metadata = causal_metadata(torch.tensor(rows), torch.tensor(starts), row_starts, slots, pools)
    assert metadata.positions.tolist() == [column for _, column in stood]
    assert metadata.slots.tolist() == slots.tolist()
    assert [len(keys.mask) for keys in metadata.keys] == counts
    assert seen(metadata) == [sorted((table[row][c], c) for c in range(column + 1)) for row, column in stood]


def test_a_dropped_causal_row_sees_nothing_and_is_seen_by_none(shuffled_pools):
    pools, rows = shuffled_pools(1, [7, 4])
    first, second = (pools.req_to_token[row].tolist() for row in rows)
    slots = torch.tensor([first[5], -1, -1, second[2], second[3]])
    metadata = causal_metadata(torch.tensor(rows), torch.tensor([5, 2]), torch.tensor([0, 3, 5]), slots, pools)
    assert metadata.positions.tolist() == [5, 0, 0, 2, 3]
    assert metadata.slots.tolist() == slots.tolist()
    assert seen(metadata) == [
        sorted((first[c], c) for c in range(6)),
        [],
        [],
        sorted((second[c], c) for c in range(3)),
        sorted((second[c], c) for c in range(4)),
    ]


PARENTS = [[-1, 0, 0, 1, 1, 3, 2], [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0, 0]]


def ancestors(parents: list[int], node: int) -> list[int]:
    """List the node, its parent and so on to the root."""
    return [node, *ancestors(parents, parents[node])] if node >= 0 else []


@pytest.mark.parametrize("max_len", [100, 9])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_tree_row_sees_the_prefix_and_its_ancestors(shuffled_pools, page_size, max_len):
    """A node at or beyond the length limit has no slot, so it sees nothing and no row sees it."""
    lengths = [5, 8, 1]
    pools, rows = shuffled_pools(page_size, [length + 7 for length in lengths])
    table = pools.req_to_token.tolist()
    expected, locations, positions = [], [], []
    for row, length, parents in zip(rows, lengths, PARENTS, strict=True):
        depth = [len(ancestors(parents, node)) - 1 for node in range(7)]
        kept = [length + depth[node] < max_len for node in range(7)]
        for node in range(7):
            prefix = [(table[row][c], c) for c in range(length)]
            path = [(table[row][length + a], length + depth[a]) for a in ancestors(parents, node)]
            expected.append(sorted(prefix + path) if kept[node] else [])
            locations.append(table[row][length + node] if kept[node] else -1)
            positions.append(length + depth[node] if kept[node] else 0)
    verify_input = tree_batch(PARENTS, lengths, locations=torch.tensor(locations))
    metadata = tree_metadata(make_batch(rows, lengths), verify_input, pools)
    assert seen(metadata) == expected
    assert metadata.slots.tolist() == locations
    assert metadata.positions.tolist() == positions


def test_a_node_without_a_slot_is_seen_by_no_other_node(shuffled_pools):
    pools, (row,) = shuffled_pools(1, [10])
    table, chain = pools.req_to_token[row].tolist(), [PARENTS[1]]
    locations = torch.tensor([-1 if node == 2 else table[3 + node] for node in range(7)])
    metadata = tree_metadata(make_batch([row], [3]), tree_batch(chain, [3], locations=locations), pools)
    everything = sorted((table[c], c) for c in range(10) if c != 5)
    assert seen(metadata)[6] == everything
    assert seen(metadata)[2] == []


# For each of three lanes, the lane with its token of every step so far; in `ancestor`, lanes have new parents.
PATHS = {
    "first step": [[0], [1], [2]],
    "lane": [[0, 0, 0], [1, 1, 1], [2, 2, 2]],
    "ancestor": [[2, 0, 0], [2, 0, 1], [1, 1, 2]],
}


def lane_layout(length: int, page_size: int, num_steps: int) -> tuple[list[list[int]], list[list[int]]]:
    """Compute (tails, lanes) of three lanes by the contract: columns of each lane's prefix tail and of its steps."""
    last = length % page_size if page_size > 1 else 0
    width = -(-(last + num_steps) // page_size) * page_size if page_size > 1 else num_steps
    first = [length - last + lane * width for lane in range(3)]
    return [[f + i for i in range(last)] for f in first], [[f + last + s for s in range(num_steps)] for f in first]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_lane_sees_the_prefix_with_its_own_tail_and_path(shuffled_pools, page_size, path):
    lengths, num_steps = [7, 8, 17], 4
    layouts = [lane_layout(length, page_size, num_steps) for length in lengths]
    pools, rows = shuffled_pools(page_size, [lanes[-1][-1] + 1 for _, lanes in layouts])
    table, steps = pools.req_to_token.tolist(), len(path[0])
    metadata = lane_metadata(
        make_batch(rows, lengths),
        torch.tensor(path).expand(3, -1, -1),
        SpecConfig(3, num_steps, 8, page_size=page_size, max_len=100),
        pools,
    )
    expected, slots = [], []
    for row, length, (tails, lanes) in zip(rows, lengths, layouts, strict=True):
        base = length - len(tails[0])
        for lane in range(3):
            prefix = [(table[row][c], c) for c in range(base)]
            tail = [(table[row][c], base + i) for i, c in enumerate(tails[lane])]
            own = [(table[row][lanes[holder][s]], length + s) for s, holder in enumerate(path[lane])]
            expected.append(sorted(prefix + tail + own))
            slots.append(table[row][lanes[lane][steps - 1]])
    assert seen(metadata) == expected
    assert metadata.slots.tolist() == slots
    assert metadata.positions.tolist() == [length + steps - 1 for length in lengths for _ in range(3)]


@pytest.mark.parametrize(("max_len", "dropped"), [(9, 0), (8, 3), (7, 3)])
def test_a_draft_step_at_the_limit_writes_and_sees_nothing(shuffled_pools, max_len, dropped):
    """Three lanes of a request of 7 are at position 8 in step 1.

    Those of a request of 2 are far from the limit.
    """
    layouts = [lane_layout(length, 4, 4) for length in (7, 2)]
    pools, rows = shuffled_pools(4, [lanes[-1][-1] + 1 for _, lanes in layouts])
    path = torch.tensor([[0, 0], [1, 1], [2, 2]]).expand(2, -1, -1)
    config = SpecConfig(3, 4, 8, page_size=4, max_len=max_len)
    metadata = lane_metadata(make_batch(rows, [7, 2]), path, config, pools)
    assert (metadata.slots < 0).tolist() == [index < dropped for index in range(6)]
    assert [not keys for keys in seen(metadata)] == [index < dropped for index in range(6)]
    assert metadata.positions.tolist() == [0 if dropped else 8] * 3 + [3] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_sees_nothing_brings_no_nan_into_the_product(shuffled_pools, dtype, monkeypatch):
    """A library's bfloat16 product over a row of NaN left NaN in other rows (oneDNN 3.10)."""
    pools, rows = shuffled_pools(4, [8])
    kv = KVBuffer(KVLayout(1, 1, 4), pools.target.keys.shape[1], dtype)
    kv.keys.normal_()
    kv.values.normal_()
    slots = pools.slots(rows[0], torch.arange(3))
    mask = torch.tensor([[True, True, False], [False, False, False]])
    metadata = AttentionMetadata(torch.tensor([1, 0]), slots[:2], (Keys(slots, torch.arange(3), mask),))
    factors, product = [], torch.einsum
    monkeypatch.setattr(torch, "einsum", lambda *terms: factors.extend(terms[1:]) or product(*terms))
    out = attention(torch.randn(2, 2, 4, dtype=dtype), 0, kv, metadata, None)
    assert len(factors) == 4
    assert all(factor.isfinite().all() for factor in factors)
    assert (out[1] == 0).all()


def test_no_requests_make_empty_metadata(shuffled_pools):
    pools, _ = shuffled_pools(4, [1])
    none, nobody = torch.empty(0, dtype=torch.int64), make_batch([], [])
    empty_tree = VerifyInput(
        draft_tokens=none.view(0, 7), parents=none.view(0, 7), scores=torch.empty(0, 7), positions=none,
        mask=torch.empty(0, 7, 7, dtype=torch.bool), retrieve_index=none.view(0, 7), cache_locations=none,
        retrieve_next_token=none.view(0, 7), retrieve_next_sibling=none.view(0, 7), proposed_depth=none.int(),
    )  # fmt: skip
    for metadata in (
        causal_metadata(none, none, torch.zeros(1, dtype=torch.int64), none, pools),
        lane_metadata(nobody, none.view(0, 3, 1), SpecConfig(3, 4, 8, max_len=100), pools),
        tree_metadata(nobody, empty_tree, pools),
    ):
        assert metadata.keys == ()
        assert metadata.positions.shape == metadata.slots.shape == (0,)
        assert metadata.positions.dtype == metadata.slots.dtype == torch.int64
        assert attention(torch.empty(0, 1, 2), 0, pools.target, metadata, None).shape == (0, 1, 2)
