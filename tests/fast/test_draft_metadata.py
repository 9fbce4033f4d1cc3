"""Metadata of trees and draft lanes in small explicit cases.

test_attention_tiles.py compares larger ones. In each the last request is padded.
"""

from types import SimpleNamespace

import torch

from specsim.core.config import SpecConfig
from specsim.fast.drafting.lanes import lane_metadata
from specsim.fast.model.metadata import tree_metadata


def test_nodes_of_a_tree_see_the_whole_prefix_unless_dropped(pools, make_batch, device):
    """The second node of the first request is dropped and no row sees it."""
    batch = make_batch([1, 0, -1], [3, 0, 0])
    mask = [[[1, 0], [0, 0]], [[1, 0], [1, 1]], [[1, 0], [1, 1]]]
    tree = SimpleNamespace(
        draft_tokens=torch.zeros(3, 2, dtype=torch.int64, device=device),
        cache_locations=torch.tensor([23, -1, 10, 11, -1, -1], device=device),
        positions=torch.tensor([3, 4, 0, 1, 0, 1], device=device),
        mask=torch.tensor(mask, dtype=torch.bool, device=device),
    )
    metadata = tree_metadata(batch, tree, pools)
    assert metadata.table is pools.req_to_token  # prefixes are read where they are
    assert metadata.table_rows is batch.req_pool_indices
    assert not metadata.is_causal
    assert metadata.row_starts.tolist() == [0, 2, 4, 6]
    assert metadata.positions.tolist() == [3, 0, 0, 1, 0, 0]
    assert metadata.prefix_lens.tolist() == [3, 0, 0, 0, 0, 0]
    assert metadata.key_lens.tolist() == [3, 0, 0]
    assert metadata.num_extras.tolist() == [2, 2, 0]
    assert metadata.extra_slots.tolist() == [[23, -1], [10, 11], [-1, -1]]
    assert metadata.visible.tolist() == [[1], [0], [1], [3], [0], [0]]


def test_a_lane_sees_whole_pages_of_the_prefix_and_its_own_tail(pools, make_batch, device):
    """Two lanes have pages of 2 and a prefix of 3, whose tail is column 2.

    Lane 1 has a copy of the tail in column 4 or later. A prefix of 2 has no tail.
    """
    batch = make_batch([1, 0, -1], [3, 2, 0])
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=2, max_len=8)
    path = torch.tensor([[[0, 0], [1, 0]]] * 3, dtype=torch.int32, device=device)
    lanes = SimpleNamespace(step=torch.zeros(1, dtype=torch.int32, device=device), path=path)
    metadata = lane_metadata(batch, lanes, config, pools)
    assert metadata.table is pools.req_to_token
    assert metadata.table_rows is batch.req_pool_indices
    assert not metadata.is_causal
    assert metadata.slots.tolist() == [23, 27, 12, 14, -1, -1]
    assert metadata.positions.tolist() == [3, 3, 2, 2, 0, 0]
    assert metadata.prefix_lens.tolist() == [2, 2, 2, 2, 0, 0]
    assert metadata.key_lens.tolist() == [2, 2, 0]
    assert metadata.num_extras.tolist() == [4, 2, 0]
    assert metadata.extra_slots[0, :4].tolist() == [22, 26, 23, 27]
    assert metadata.extra_slots[1, :2].tolist() == [12, 14]
    assert metadata.extra_positions[0, :4].tolist() == [2, 2, 3, 3]
    assert metadata.extra_positions[1, :2].tolist() == [2, 2]
    assert metadata.visible.tolist() == [[0b0101], [0b1010], [0b01], [0b10], [0], [0]]


def test_a_bonus_column_moves_lanes_and_prefix(pools, make_batch, device):
    """Lanes of a drafter with a bonus column stand as those of requests that are one token longer."""
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=2, max_len=8)
    path = torch.tensor([[[0, 0], [1, 0]]] * 3, dtype=torch.int32, device=device)
    lanes = SimpleNamespace(step=torch.zeros(1, dtype=torch.int32, device=device), path=path)
    ahead = lane_metadata(make_batch([1, 0, -1], [2, 1, 0]), lanes, config, pools, bonus_columns=1)
    longer = lane_metadata(make_batch([1, 0, -1], [3, 2, 0]), lanes, config, pools)
    for name in ("slots", "positions", "prefix_lens", "key_lens", "num_extras", "visible"):
        assert torch.equal(getattr(ahead, name), getattr(longer, name)), name
    assert ahead.positions.tolist() == [3, 3, 2, 2, 0, 0]
