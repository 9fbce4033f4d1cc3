"""Metadata of prefill and draft-extend in small explicit cases.

test_attention_tiles.py compares larger ones.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch

from specsim.core.phases import Batch, PrefillInput
from specsim.fast.model.metadata import AttentionMetadata, extend_metadata, prefill_metadata


def assert_table_is_the_pools(metadata: AttentionMetadata, pools: SimpleNamespace, batch: Batch) -> None:
    """Check that prefixes are read from the pool's table, so that a forward makes nothing of its length."""
    assert metadata.table is pools.req_to_token
    assert metadata.table_rows is batch.req_pool_indices


def test_rows_of_a_prefill_see_up_to_themselves(pools, make_batch, device, program_order):
    """Chunks have 3 tokens and 1, after 4 and 2 earlier ones."""
    batch = make_batch([0, 1], [7, 3])
    chunks = replace(PrefillInput.of_prompts([[5, 6, 7], [8]]), start_lens=torch.tensor([4, 2])).to(device)
    metadata = prefill_metadata(batch, chunks, pools)
    assert_table_is_the_pools(metadata, pools, batch)
    assert metadata.is_causal
    assert (metadata.max_rows, metadata.has_equal_rows) == (3, False)
    assert metadata.row_starts.tolist() == [0, 3, 4]
    assert metadata.slots.tolist() == [14, 15, 16, 22]
    assert metadata.positions.tolist() == [4, 5, 6, 2]
    assert metadata.prefix_lens.tolist() == [5, 6, 7, 3]
    assert metadata.key_lens.tolist() == [7, 3]
    assert metadata.num_extras.tolist() == [0, 0]


def test_rows_of_a_draft_extend_see_up_to_themselves(pools, make_batch, device):
    batch = make_batch([0, 1, -1], [2, 4, 0])
    extend = SimpleNamespace(
        input_ids=torch.zeros(6, dtype=torch.int64, device=device),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        row_starts=torch.tensor([0, 2, 4, 6], device=device),
        cache_locations=torch.tensor([12, 13, 24, -1, -1, -1], device=device),
    )
    metadata = extend_metadata(batch, extend, pools)
    assert_table_is_the_pools(metadata, pools, batch)
    assert metadata.is_causal
    assert metadata.positions.tolist() == [2, 3, 4, 0, 0, 0]
    assert metadata.prefix_lens.tolist() == [3, 4, 5, 0, 0, 0]
    assert metadata.key_lens.tolist() == [4, 6, 0]  # at most
    assert metadata.num_extras.tolist() == [0, 0, 0]
    assert metadata.extra_slots.shape == metadata.extra_positions.shape == (3, 0)
