"""Metadata of prefill and draft-extend in small explicit cases.

test_attention_tiles.py compares larger ones.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, PrefillInput
from specsim.fast.drafting.lanes import lane_metadata
from specsim.fast.model.metadata import (
    AttentionMetadata,
    equal_rows,
    extend_metadata,
    known_token,
    prefill_metadata,
    slot_of,
    store_own_extras,
    store_rows,
    tree_metadata,
)
from specsim.fast.runtime.launch import kernel

ROWS = 3


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


@kernel
@no_type_check
def _read(table_ptr, rows_ptr, columns_ptr, mask_ptr, slots_ptr, tokens_ptr, width):
    offs = tl.arange(0, 4)
    row = tl.load(rows_ptr + offs)
    column = tl.load(columns_ptr + offs)
    mask = tl.load(mask_ptr + offs)
    tl.store(slots_ptr + offs, slot_of(table_ptr, width, row, column, mask=mask))
    tl.store(tokens_ptr + offs, known_token(table_ptr, width, row, column, mask=mask))


def test_columns_are_read_within_their_row(pools, device):
    """Column 8 of the first row is the second row's first in memory."""
    rows, columns = torch.tensor([[1, 0, 0, 1], [3, 7, 8, 0]], device=device)
    slots, tokens = torch.empty(2, 4, dtype=torch.int64, device=device)
    _read[(1,)](
        table_ptr=pools.req_to_token,
        rows_ptr=rows,
        columns_ptr=columns,
        mask_ptr=torch.tensor([True, True, True, False], device=device),
        slots_ptr=slots,
        tokens_ptr=tokens,
        width=pools.req_to_token.shape[1],
    )
    assert slots.tolist() == [23, 17, -1, -1]
    assert tokens.tolist() == [23, 17, 0, 0]


@kernel
@no_type_check
def _store(metadata_ptrs, slots_ptr, total, num_rows, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < total
    store_rows(
        metadata_ptrs,
        offs,
        num_rows,
        position=offs + 100,
        prefix_len=offs + 200,
        key_len=offs + 300,
        num_extras=offs + 400,
        mask=mask,
    )
    store_own_extras(metadata_ptrs, offs, tl.load(slots_ptr + offs, mask=mask), offs + 100, mask)


def test_every_entry_is_written_by_programs_of_any_size(pools, make_batch, device):
    """Blocks of four rows end inside requests of three."""
    batch = make_batch([1, 0], [5, 1])
    slots = torch.tensor([7, 5, -1, 9, 8, 4], device=device)
    metadata = equal_rows(batch, slots, ROWS, ROWS, pools)
    _store[(2,)](metadata_ptrs=metadata.tensors, slots_ptr=slots, total=len(slots), num_rows=ROWS, BLOCK=4)
    assert metadata.positions.tolist() == [*range(100, 106)]
    assert metadata.prefix_lens.tolist() == [*range(200, 206)]
    assert metadata.key_lens.tolist() == [300, 303]
    assert metadata.num_extras.tolist() == [400, 403]
    assert metadata.row_starts.tolist() == [0, 3, 6]
    assert metadata.extra_slots.tolist() == [[7, 5, -1], [9, 8, 4]]
    assert metadata.extra_positions.tolist() == [[100, 101, 102], [103, 104, 105]]
    assert metadata.visible.shape == (6, 1)
    assert (metadata.max_rows, metadata.has_equal_rows, metadata.is_causal) == (ROWS, True, False)
    assert metadata.slots is slots
    assert metadata.table_rows is batch.req_pool_indices


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
