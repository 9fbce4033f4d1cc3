"""Plans of products of few and of many rows, which depend on shapes and fit into a GPU's memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.fast.model import product_plan
from specsim.fast.model.linear import tile_arguments
from specsim.fast.model.product_plan import (
    BLOCK_K,
    BLOCK_N,
    PROGRAMS,
    ProductTiling,
    choose,
    plan_many_rows,
)
from specsim.fast.model.rows import HiddenRows
from specsim.fast.runtime.launch import INTERPRETED, ceil_div

weights = st.tuples(st.integers(1, 40_000), st.integers(1, 20_000))


@pytest.fixture
def wide(monkeypatch):
    """Say whether the GPU has wide products."""

    def has_wide(answer: bool) -> None:
        choose.cache_clear()
        monkeypatch.setattr(product_plan, "has_warp_roles", lambda: answer)

    yield has_wide
    choose.cache_clear()


def test_wide_products_take_more_rows_than_a_narrow_tile(wide):
    """With batch_invariant they take any number of rows, but no small, odd or wide weight."""
    wide(True)
    bf16 = torch.bfloat16
    plan = plan_many_rows(4096, 14336)
    assert {choose(rows, 4096, 14336, bf16, False) for rows in (17, 64, 128)} == {plan}
    assert {choose(rows, 4096, 14336, bf16, True) for rows in (1, 16, 128, 129, 5000)} == {plan}
    others = [choose(rows, 4096, 14336, bf16, False) for rows in (16, 129)]
    others += [choose(64, *shape, bf16, True) for shape in ((64, 64), (4096, 4100), (4100, 4096))]
    others += [choose(64, 4096, 14336, dtype, True) for dtype in (torch.float16, torch.float32)]
    assert not any(isinstance(other, type(plan)) for other in others)


def test_the_choice_depends_only_on_the_shape(wide):
    """The library takes many rows, small weights and wide types."""
    wide(False)
    bf16 = torch.bfloat16
    assert choose(65, 4096, 4096, bf16, False) is None
    assert choose(1, 64, 64, bf16, False) is None
    assert choose(1, 4096, 4096, torch.float32, False) is None
    if not INTERPRETED:
        assert (
            choose(1, 4096, 14336, bf16, False) == choose(16, 4096, 14336, bf16, False) == ProductTiling(16, 32, 512, 4)
        )
        assert choose(17, 4096, 4096, bf16, False).block_m == 64
        assert choose(16, 128256, 4096, bf16, False).block_m == 16
        assert choose(17, 128256, 4096, bf16, False) is None
    assert {choose(rows, 4096, 4096, bf16, True) for rows in (1, 64, 1000)} == {ProductTiling(64, 32, 256, 4)}
    assert choose(1, 28672, 4096, torch.float32, True, True) == ProductTiling(64, 64, 32, 4)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_in_flight_fit_into_a_small_gpus_memory(dtype, is_gated, wide, monkeypatch):
    """All stages but one hold a tile of the rows and one of each weight."""
    wide(False)
    memory, tiling, weights = 99 * 2**10, choose(64, 4096, 4096, dtype, True, is_gated), 1 + is_gated
    monkeypatch.setattr("specsim.fast.runtime.launch.INTERPRETED", False)
    monkeypatch.setattr("specsim.fast.runtime.launch._shared_memory", lambda: memory)
    stages = tile_arguments(tiling, HiddenRows(torch.empty(64, 4096, dtype=dtype)), 4096, 4096, weights)["STAGES"]
    entries = (tiling.block_m + weights * tiling.block_n) * tiling.block_k
    assert 2 <= stages <= tiling.stages
    assert (stages - 1) * entries * dtype.itemsize <= memory


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
    least = ceil_div(plan.num_tiles * plan.blocks, PROGRAMS)
    assert plan.programs <= PROGRAMS
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
