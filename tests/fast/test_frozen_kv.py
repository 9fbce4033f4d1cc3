"""Metadata of rows that see a request's committed columns only; the last request is padded."""

import pytest
import torch

from specsim.fast.drafters.frozen_kv import root_metadata
from specsim.fast.vocabulary.draft_distribution import Root


@pytest.mark.parametrize(("position", "places"), [("last", [4, 4, 0, 0, 0, 0]), ("next", [5, 5, 1, 1, 0, 0])])
def test_rows_see_the_prefix_from_one_position_and_write_nothing(pools, make_batch, position, places):
    batch = make_batch([1, 0, -1], [5, 1, 0])
    metadata = root_metadata(batch, Root(batch.seq_lens), 2, position, pools)
    assert metadata.table is pools.req_to_token
    assert metadata.table_rows is batch.req_pool_indices
    assert not metadata.is_causal
    assert (metadata.max_rows, metadata.has_equal_rows) == (2, True)
    assert metadata.row_starts.tolist() == [0, 2, 4, 6]
    assert metadata.slots.tolist() == [-1] * 6
    assert metadata.positions.tolist() == places
    assert metadata.prefix_lens.tolist() == [5, 5, 1, 1, 0, 0]
    assert metadata.key_lens.tolist() == [5, 1, 0]
    assert metadata.num_extras.tolist() == [0, 0, 0]
    assert metadata.extra_slots.shape == (3, 0)
    assert metadata.visible.shape == (6, 0)


def test_the_accepted_tokens_belong_to_the_prefix_after_a_round(pools, make_batch, device):
    """A padded request counts one accepted token, and still sees nothing."""
    batch = make_batch([1, 0, -1], [3, 1, 0])
    counts = torch.tensor([2, 1, 1], dtype=torch.int32, device=device)
    metadata = root_metadata(batch, Root(batch.seq_lens, counts), 1, "last", pools)
    assert metadata.positions.tolist() == [4, 1, 0]
    assert metadata.prefix_lens.tolist() == metadata.key_lens.tolist() == [5, 2, 0]
