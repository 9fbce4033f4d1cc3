"""Warps copy every entry of an attention tile once, 16 bytes in a lane."""

import itertools

import pytest


@pytest.mark.parametrize("dim", [64, 128])
def test_lanes_copy_every_entry_of_a_tile_once(dim):
    """A lane has 8 neighbours at a time, lanes fill rows in order, and a warp has 32 consecutive rows."""
    from specsim.fast.model.attention_pipeline import BLOCK_C, copy_layout

    layout = copy_layout(dim)
    parts = (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    assert [len(bases) for bases in parts[1:]] == [5, 2]
    bases = [base for part in parts for base in part]
    places = set()
    for chosen in itertools.product((0, 1), repeat=len(bases)):
        own = [base for base, bit in zip(bases, chosen, strict=True) if bit]
        places.add((sum(row for row, _ in own), sum(column for _, column in own)))
    assert places == set(itertools.product(range(BLOCK_C.value), range(dim)))
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 4]]
    assert layout.lane_bases[0] == [0, 8]
    assert layout.warp_bases == [[32, 0], [64, 0]]
