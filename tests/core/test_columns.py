"""Logical columns of a round, and their owners under both release modes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specsim.core.columns import (
    lane_stride,
    prefix_tail,
    release_uncommitted,
    reserve_lanes,
    reserve_tree,
    round_columns,
)
from specsim.core.config import SpecConfig
from specsim.core.pool import lane_columns

from .pools import make_pool


@st.composite
def rounds(draw):
    """Draw a setting, a first length, the accepted drafts of two requests in some rounds, and bonus_columns."""
    topk, num_steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_draft_tokens = num_steps + 1 if topk == 1 else draw(st.integers(2, topk + (num_steps - 1) * topk**2 + 1))
    config = SpecConfig(
        topk,
        num_steps,
        num_draft_tokens,
        page_size=draw(st.sampled_from([1, 3, 4])),
        release=draw(st.sampled_from(["finish", "round"])),
    )
    most = min(num_steps, num_draft_tokens - 1)
    accepted = st.tuples(st.integers(0, most), st.integers(0, most))
    return config, draw(st.integers(1, 11)), draw(st.lists(accepted, min_size=1, max_size=5)), draw(st.integers(0, 1))


@given(rounds())
def test_ownership_through_rounds(case):
    """Two requests have different lengths and accept different drafts, under both release modes."""
    config, length, accepted, bonus_columns = case
    page_size, lengths = config.page_size, [length, length + 5]
    width = config.reserved_columns(lengths[1] + 5 * (config.num_steps + 1) + bonus_columns)
    pool = make_pool(2 * width, page_size, 2, width)
    rows = [pool.open(), pool.open()]
    for row, start in zip(rows, lengths, strict=True):
        pool.reserve(row, start + bonus_columns)
    for drafts in accepted:
        reserve_lanes(pool, rows, lengths, config, bonus_columns)
        for row, start in zip(rows, lengths, strict=True):
            first = start + bonus_columns
            lanes = first - prefix_tail(first, config) + config.topk * lane_stride(first, config)
            most = first + 2 * config.need if config.release == "finish" else lanes
            assert lanes <= pool.owned_columns(row) < most + page_size
            assert pool.owned_columns(row) <= -(-round_columns(start, config, bonus_columns) // page_size) * page_size
        reserve_tree(pool, rows, lengths, config, bonus_columns)
        tree_ends = [start + config.num_draft_tokens + bonus_columns for start in lengths]
        for row, end in zip(rows, tree_ends, strict=True):
            assert end <= pool.owned_columns(row)
            assert config.release == "finish" or pool.owned_columns(row) < end + page_size
        lengths = [start + count + 1 for start, count in zip(lengths, drafts, strict=True)]
        release_uncommitted(pool, rows, lengths, config, bonus_columns)
        for row, end in zip(rows, lengths, strict=True):
            assert end + bonus_columns <= pool.owned_columns(row)
            assert config.release == "finish" or pool.owned_columns(row) < end + bonus_columns + page_size
        pool.audit()
    for row in rows:
        pool.close(row)
    counts = pool.audit()
    assert counts.pop("slots") == counts.pop("free") == 2 * width
    assert not any(counts.values())


@given(rounds())
def test_release_finish_never_frees_or_moves_a_slot(case):
    config, length, accepted, _ = case
    config = SpecConfig(config.topk, config.num_steps, config.num_draft_tokens, config.page_size, release="finish")
    width = config.reserved_columns(length + 5 * (config.num_steps + 1))
    pool = make_pool(width, config.page_size, 1, width)
    row = pool.open()
    for drafts, _ in accepted:
        before = pool.req_to_token[row].clone()
        reserve_lanes(pool, [row], [length], config)
        reserve_tree(pool, [row], [length], config)
        length += drafts + 1
        release_uncommitted(pool, [row], [length], config)
        owned = before >= 0
        assert torch.equal(pool.req_to_token[row][owned], before[owned])


def test_release_round_keeps_the_slots_of_the_prefix():
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, release="round")
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, 6)
    prefix = pool.req_to_token[row, :6].tolist()
    reserve_lanes(pool, [row], [6], config)
    assert pool.owned_columns(row) == 12  # 4 + 2 lanes of one page: tail 2 and 2 steps
    reserve_tree(pool, [row], [6], config)
    assert pool.owned_columns(row) == 12  # 6 + 5 nodes
    release_uncommitted(pool, [row], [7], config)
    assert pool.owned_columns(row) == 8
    assert pool.req_to_token[row, :6].tolist() == prefix


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9), st.integers(0, 1), st.data())
def test_reservations_hold_two_rounds_with_a_bonus_column(seq_len, topk, num_steps, page_size, bonus_columns, data):
    """A schedule whose lengths lag one round reserves for L, while the round starts at up to L + S + 1."""
    most = topk + (num_steps - 1) * topk**2 + 1
    width = num_steps + 1 if topk == 1 else data.draw(st.integers(2, most))
    config = SpecConfig(topk, num_steps, width, page_size)
    reserved = config.reserved_columns(seq_len + bonus_columns)
    for first_round in range(min(num_steps, width - 1) + 2):
        start = seq_len + first_round
        lanes = lane_columns(start + bonus_columns, config)
        written = [int(lanes.max()), start + width - 1, start + num_steps + bonus_columns]
        assert max(written) < reserved


def test_a_lead_adds_its_columns_to_the_reservation():
    """Two rounds of a chain of 3 end at L + 8, where the next root stands."""
    config = SpecConfig(topk=1, num_steps=3, page_size=1)
    assert config.reserved_columns(5) == 5 + 8
    assert round_columns(5, config, ahead=1) == config.reserved_columns(6) == 5 + 8 + 1
