"""Shares of a wide product cover the weight once, and parts of a tile never share memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.fast.model.wide_plan import BLOCK_K, BLOCK_N, MOST_PROGRAMS, plan_wide
from specsim.fast.runtime.launch import ceil_div

weights = st.tuples(st.integers(1, 40_000), st.integers(1, 20_000))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_programs_stream_every_block_once(shape):
    plan = plan_wide(*shape)
    blocks = [block for program in range(plan.programs) for block in plan.blocks_of(program)]
    assert blocks == list(range(ceil_div(shape[0], BLOCK_N) * ceil_div(shape[1], BLOCK_K)))
    assert all(plan.blocks_of(program) for program in range(plan.programs))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_parts_of_a_tile_are_added_in_the_order_of_blocks(shape):
    """They are the programs that stream some of its blocks."""
    plan = plan_wide(*shape)
    owners = [[] for _ in range(plan.num_tiles)]
    for program in range(plan.programs):
        for tile in sorted({block // plan.blocks for block in plan.blocks_of(program)}):
            owners[tile].append(program)
    assert owners == [list(plan.parts_of(tile)) for tile in range(plan.num_tiles)]
    assert plan.most_parts == max(map(len, owners))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_parts_have_places_of_their_own(shape):
    """A program keeps two parts: of a tile that it begins, and of one that another program began."""
    plan = plan_wide(*shape)
    shared = [parts for tile in range(plan.num_tiles) if len(parts := plan.parts_of(tile)) > 1]
    places = [2 * program + (program == parts[0]) for parts in shared for program in parts]
    assert len(places) == len(set(places))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_no_multiprocessor_is_left_far_behind(shape):
    """A share is at most a third longer than an equal one."""
    plan = plan_wide(*shape)
    least = ceil_div(plan.num_tiles * plan.blocks, MOST_PROGRAMS)
    assert plan.programs <= MOST_PROGRAMS
    assert least <= plan.share <= max(least, least * 1.34)


def test_shares_of_a_common_layer_end_where_tiles_do():
    """Tiles of Llama-3-8B's products onto the hidden state have four equal parts."""
    for inner in (4096, 14336):
        plan = plan_wide(4096, inner)
        assert plan.most_parts == 4
        assert plan.blocks == 4 * plan.share
    assert plan_wide(4096, 4096).fits_heads(128)
    assert not plan_wide(4096, 4096).fits_heads(96)
