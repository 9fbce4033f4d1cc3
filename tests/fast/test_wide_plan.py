"""Shares of a wide product cover the weight once, and parts of a tile never share memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.fast.model.product_plan import BLOCK_K, BLOCK_N, MOST_PROGRAMS, plan_many_rows
from specsim.fast.runtime.launch import ceil_div

weights = st.tuples(st.integers(1, 40_000), st.integers(1, 20_000))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_programs_stream_every_block_once(shape):
    plan = plan_many_rows(*shape)
    blocks = [block for program in range(plan.programs) for block in plan.blocks_of(program)]
    assert blocks == list(range(ceil_div(shape[0], BLOCK_N) * ceil_div(shape[1], BLOCK_K)))
    assert all(plan.blocks_of(program) for program in range(plan.programs))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_parts_of_a_tile_are_added_in_the_order_of_blocks(shape):
    """They are the programs that stream some of its blocks."""
    plan = plan_many_rows(*shape)
    owners = [[] for _ in range(plan.num_tiles)]
    for program in range(plan.programs):
        for tile in sorted({block // plan.blocks for block in plan.blocks_of(program)}):
            owners[tile].append(program)
    assert owners == [list(plan.parts_of(tile)) for tile in range(plan.num_tiles)]
    assert plan.most_parts == max(map(len, owners))


@given(weights)
@settings(max_examples=150, deadline=None)
def test_a_program_leaves_one_part_to_others(shape):
    """It is the first of its parts: all programs of a tile finish it, or the one that begins it."""
    plan = plan_many_rows(*shape)
    for tile in range(plan.num_tiles):
        begins, *others = plan.parts_of(tile)
        assert all(plan.blocks_of(program).start // plan.blocks == tile for program in others)
        if others:
            assert plan.blocks_of(begins).stop <= (tile + 1) * plan.blocks
        if plan.finishers > 1:
            assert len(others) == plan.finishers - 1
            assert plan.blocks_of(begins).start == tile * plan.blocks


@given(weights, st.integers(0, 140))
@settings(max_examples=150, deadline=None)
def test_programs_never_wait_for_each_other_in_vain(shape, spare):
    """A GPU starts programs in their order, as many as it has multiprocessors: at least a tile's."""
    plan = plan_many_rows(*shape)
    multiprocessors = plan.most_parts + spare
    waiting = list(range(plan.programs))
    running: dict[int, int] = {}  # programs and the number of their tiles that are done
    written = [0] * plan.num_tiles  # parts that others await
    while waiting or running:
        while waiting and len(running) < multiprocessors:
            running[waiting.pop(0)] = 0
        before = dict(running), list(written)
        for program, done in before[0].items():
            tiles = sorted({block // plan.blocks for block in plan.blocks_of(program)})
            tile = tiles[done]
            parts = plan.parts_of(tile)
            if plan.finishers > 1:
                written[tile] |= 1 << (program - parts.start)
                is_done = written[tile] == (1 << len(parts)) - 1
            elif program == parts.start:
                is_done = written[tile] == len(parts) - 1
            else:
                written[tile] += 1
                is_done = True
            running[program] = done + is_done
            if running[program] == len(tiles):
                del running[program]
        assert (running, written) != before


@given(weights)
@settings(max_examples=150, deadline=None)
def test_no_multiprocessor_is_left_far_behind(shape):
    """A share is at most a third longer than an equal one."""
    plan = plan_many_rows(*shape)
    least = ceil_div(plan.num_tiles * plan.blocks, MOST_PROGRAMS)
    assert plan.programs <= MOST_PROGRAMS
    assert least <= plan.share <= max(least, least * 1.34)


def test_shares_of_a_common_layer_end_where_tiles_do():
    """Tiles of Llama-3-8B's products onto the hidden state have four equal parts."""
    for inner in (4096, 14336):
        plan = plan_many_rows(4096, inner)
        assert plan.most_parts == 4
        assert plan.blocks == 4 * plan.share
        assert plan.finishers == 4
    assert plan_many_rows(2 * 14336, 4096).finishers == 1  # whole tiles
    assert plan_many_rows(4096, 4096).fits_heads(128)
    assert not plan_many_rows(4096, 4096).fits_heads(96)
