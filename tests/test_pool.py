from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsim.config import InputError, SpecConfig
from specsim.pool import (
    KVBuffer,
    KVLayout,
    KVPool,
    OutOfSlots,
    PageAllocator,
    lane_stride,
    own_committed,
    own_lanes,
    own_tree,
    prefix_tail,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=3)
P = 4


def make_pool(num_slots: int = 40, page_size: int = P, num_requests: int = 3, width: int = 32) -> KVPool:
    return KVPool(KVBuffer(LAYOUT, num_slots, torch.float32), None, page_size, num_requests, width)


def snapshot(pool: KVPool):
    return pool.req_to_token.tolist(), pool.token_ids.tolist(), pool.audit(), pool._allocator.free_pages()


def numbered(num_slots: int) -> KVBuffer:
    """Every slot holds its own number, in every layer and head; values are negated."""
    buffer = KVBuffer(LAYOUT, num_slots, torch.float32)
    buffer.keys[:] = torch.arange(num_slots)[:, None, None]
    buffer.values[:] = -buffer.keys
    return buffer


def held(buffer: KVBuffer) -> list[int]:
    """The number in every slot, which must be the same in all layers, heads and components, and in the values."""
    assert torch.equal(buffer.keys, -buffer.values)
    assert torch.equal(buffer.keys, buffer.keys[:1, :, :1, :1].expand_as(buffer.keys))
    return buffer.keys[0, :, 0, 0].int().tolist()


@given(st.lists(st.integers(-2, 4), max_size=30))
def test_allocator_is_first_in_first_out(sizes):
    """A positive size allocates, a negative one frees the oldest pages in use; a deque is the model."""
    allocator, free, used = PageAllocator(7), deque(range(7)), deque()
    for size in sizes:
        if size < 0:
            pages = [used.popleft() for _ in range(min(-size, len(used)))]
            allocator.free(pages)
            free.extend(pages)
        elif size <= len(free):
            pages = [free.popleft() for _ in range(size)]
            assert allocator.allocate(size) == pages
            used.extend(pages)
        else:
            with pytest.raises(OutOfSlots):
                allocator.allocate(size)
        assert allocator.free_pages() == tuple(free)
        assert allocator.num_free == len(free)


@pytest.mark.parametrize("columns", range(18))
def test_reserve_owns_the_fewest_whole_pages(columns):
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, columns)
    owned = pool.owned_columns(row)
    assert owned % P == 0
    assert 0 <= owned - columns < P
    assert pool.free_slots == 40 - owned
    assert (pool.req_to_token[row] >= 0).tolist() == [column < owned for column in range(32)]


def test_reserve_never_shrinks_and_keeps_the_slots_it_has():
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, 5)
    before = pool.req_to_token[row, :8].tolist()
    pool.reserve(row, 3)
    pool.reserve(row, 12)
    assert pool.owned_columns(row) == 12
    assert pool.req_to_token[row, :8].tolist() == before


def test_slots_of_a_page_follow_each_other_and_no_slot_has_two_owners():
    pool = make_pool()
    rows = [pool.open() for _ in range(3)]
    for columns in (3, 9, 12):
        for row in rows:
            pool.reserve(row, columns)
    owned = pool.req_to_token[pool.req_to_token >= 0]
    assert sorted(owned.tolist()) == list(range(36))
    for page in owned.view(-1, P):
        assert page.tolist() == list(range(int(page[0]), int(page[0]) + P))
        assert page[0] % P == 0


def test_release_keeps_the_page_of_the_last_kept_column():
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, 14)
    kept = pool.req_to_token[row, :8].tolist()
    pool.release(row, 5)
    assert pool.owned_columns(row) == 8
    assert pool.req_to_token[row].tolist() == kept + [-1] * 24
    pool.release(row, 30)
    assert pool.owned_columns(row) == 8
    pool.release(row)
    assert (pool.owned_columns(row), pool.free_slots) == (0, 40)


def test_close_returns_everything_and_the_row_can_be_opened_again():
    pool = make_pool(num_requests=1)
    row = pool.open()
    pool.reserve(row, 9)
    pool.token_ids[row, :9] = 7
    pool.close(row)
    assert (pool.req_to_token == -1).all()
    assert (pool.token_ids == -1).all()
    assert pool.audit() == {"slots": 40, "free": 40, "owned": 0, "requests": 0}
    assert pool.open() == row


def test_audit_counts():
    pool = make_pool()
    first, second = pool.open(), pool.open()
    pool.reserve(first, 9)
    pool.reserve(second, 1)
    assert pool.audit() == {"slots": 40, "free": 24, "owned": 16, "requests": 2}


def test_out_of_slots_leaves_nothing_changed():
    pool = make_pool(num_slots=16)
    first, second = pool.open(), pool.open()
    pool.reserve(first, 9)
    pool.reserve(second, 1)
    before = snapshot(pool)
    with pytest.raises(OutOfSlots, match="1 pages asked for, 0 of 4 are free"):
        pool.reserve(second, 5)
    assert snapshot(pool) == before


def test_a_reservation_wider_than_the_table_leaves_nothing_changed():
    pool = make_pool(width=8)
    row = pool.open()
    pool.reserve(row, 3)
    before = snapshot(pool)
    with pytest.raises((RuntimeError, IndexError)):
        pool.reserve(row, 12)
    assert snapshot(pool) == before


def test_no_row_is_left_when_all_requests_are_open():
    pool = make_pool(num_requests=2)
    assert {pool.open(), pool.open()} == {0, 1}
    with pytest.raises(OutOfSlots, match="2 rows"):
        pool.open()


def test_table_is_whole_pages_wide_and_starts_empty():
    pool = make_pool(width=30)
    assert pool.req_to_token.shape == (3, 32)
    assert pool.token_ids.shape == (3, 30)
    assert (pool.req_to_token == -1).all()
    assert (pool.token_ids == -1).all()


def test_a_pool_is_whole_pages():
    with pytest.raises(InputError, match="num_slots is 42; allowed: a multiple of the page size, 4"):
        make_pool(num_slots=42)


def busy_pool() -> KVPool:
    pool = make_pool()
    for columns in (9, 5):
        pool.reserve(pool.open(), columns)
    pool.audit()
    return pool


def page_is_free_twice(pool):
    pool._allocator._free.append(pool._allocator._free[0])


def page_is_owned_and_free(pool):
    pool._allocator.free([pool._pages[0][0]])


def page_has_two_owners(pool):
    pool._pages[1][0] = pool._pages[0][0]
    pool.req_to_token[1, :P] = pool.req_to_token[0, :P]


def page_is_twice_in_one_request(pool):
    pool._pages[0][1] = pool._pages[0][0]
    pool.req_to_token[0, P : 2 * P] = pool.req_to_token[0, :P]


def page_leaks_from_the_free_list(pool):
    pool._allocator._free.popleft()


def page_leaks_from_a_request(pool):
    pool._pages[1].pop()
    pool.req_to_token[1, P : 2 * P] = -1


def request_is_forgotten(pool):
    del pool._pages[1]
    pool.req_to_token[1] = -1


def table_points_elsewhere(pool):
    pool.req_to_token[0, 5] += 1


def table_lost_a_column(pool):
    pool.req_to_token[1, 7] = -1


def tables_of_two_requests_are_swapped(pool):
    pool.req_to_token[:2] = pool.req_to_token[:2].flip(0)


def released_column_is_still_in_the_table(pool):
    pool._allocator.free([pool._pages[0].pop()])


def closed_row_is_still_in_the_table(pool):
    pool._allocator.free(pool._pages.pop(1))


def free_page_does_not_exist(pool):
    pool._allocator._free[0] = 99


CORRUPTIONS = [
    page_is_free_twice,
    page_is_owned_and_free,
    page_has_two_owners,
    page_is_twice_in_one_request,
    page_leaks_from_the_free_list,
    page_leaks_from_a_request,
    request_is_forgotten,
    table_points_elsewhere,
    table_lost_a_column,
    tables_of_two_requests_are_swapped,
    released_column_is_still_in_the_table,
    closed_row_is_still_in_the_table,
    free_page_does_not_exist,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda function: function.__name__)
def test_audit_catches(corrupt):
    pool = busy_pool()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.audit()


def test_slots_broadcasts_rows_and_columns():
    pool = busy_pool()
    slots = pool.slots(torch.tensor([[1], [0]]), torch.tensor([0, 6, 7]))
    assert slots.tolist() == [[int(pool.req_to_token[row, column]) for column in (0, 6, 7)] for row in (1, 0)]


@pytest.mark.parametrize("row", [1, torch.tensor([1])], ids=["int", "tensor"])
def test_a_column_that_is_not_owned_is_an_error(row):
    """Row 1 owns columns 0 to 7; the engine asks by tensor for batches and by number for one request."""
    with pytest.raises(IndexError, match="row 1 of the request table owns no slot at column 8"):
        busy_pool().slots(row, torch.tensor([7, 8]))


def test_write_skips_slot_minus_one():
    buffer = numbered(5)
    rows = torch.full((3, 1, 3), 9.0)
    buffer.write(1, torch.tensor([3, -1, 0]), rows, -rows)
    assert buffer.keys[1, :, 0, 0].tolist() == [9, 1, 2, 9, 4]
    assert buffer.values[1, :, 0, 2].tolist() == [-9, -1, -2, -9, -4]
    assert buffer.keys[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("source", "destination", "after"),
    [
        ([0, 1, 2], [1, 2, 3], [0, 0, 1, 2, 4, 5]),
        ([1, 2, 3], [0, 1, 2], [1, 2, 3, 3, 4, 5]),
        ([4, 5], [5, 4], [0, 1, 2, 3, 5, 4]),
        ([2, 2], [0, 5], [2, 1, 2, 3, 4, 2]),
        ([3], [3], [0, 1, 2, 3, 4, 5]),
        ([], [], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_move_gathers_before_it_scatters(source, destination, after):
    buffer = numbered(6)
    buffer.move(torch.tensor(source, dtype=torch.int64), torch.tensor(destination, dtype=torch.int64))
    assert held(buffer) == after


def test_lanes_of_the_worked_example():
    """L=7, P=4, S=5, K=8: 3 tokens of the tail, 2 pages a lane, lanes start at columns 7, 15, 23 and so on."""
    config = SpecConfig(topk=8, num_steps=5, num_draft_tokens=64, page_size=4)
    assert prefix_tail(7, config) == 3
    assert lane_stride(7, config) == 8
    pool = make_pool(num_slots=400, width=200)
    row = pool.open()
    pool.reserve(row, 7)
    own_lanes(pool, [row], [7], config)
    assert pool.owned_columns(row) == 136  # ceil_4(7 + 2·64)


@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (1, 4), (3, 1)])
def test_lanes_that_share_the_prefix_follow_each_other(topk, page_size):
    config = SpecConfig(topk=topk, num_steps=3, num_draft_tokens=4, page_size=page_size)
    assert {prefix_tail(length, config) for length in range(9)} == {0}
    assert {lane_stride(length, config) for length in range(9)} == {3}


@given(st.integers(1, 60), st.integers(2, 4), st.integers(1, 9), st.integers(2, 9))
def test_lanes_of_pages_hold_tail_and_steps_on_pages_of_their_own(seq_len, topk, num_steps, page_size):
    config = SpecConfig(topk, num_steps, 2, page_size)
    tail, stride = prefix_tail(seq_len, config), lane_stride(seq_len, config)
    assert (seq_len - tail) % page_size == 0
    assert 0 <= tail < page_size
    assert stride % page_size == 0
    assert tail + num_steps <= stride < tail + num_steps + page_size


@st.composite
def rounds(draw):
    """A setting, a first length and the accepted drafts of some rounds."""
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
    return config, draw(st.integers(1, 11)), draw(st.lists(st.integers(0, most), min_size=1, max_size=5))


@given(rounds())
def test_ownership_through_rounds(case):
    """Two requests a round apart in length, under both release modes."""
    config, length, accepted = case
    page_size, lengths = config.page_size, [length, length + 5]
    width = config.reserved_columns(lengths[1] + 5 * (config.num_steps + 1))
    pool = make_pool(2 * width, page_size, 2, width)
    rows = [pool.open(), pool.open()]
    for row, start in zip(rows, lengths, strict=True):
        pool.reserve(row, start)
    for drafts in accepted:
        own_lanes(pool, rows, lengths, config)
        for row, start in zip(rows, lengths, strict=True):
            lanes = start - prefix_tail(start, config) + config.topk * lane_stride(start, config)
            most = start + 2 * config.need if config.release == "finish" else lanes
            assert lanes <= pool.owned_columns(row) < most + page_size
        own_tree(pool, rows, lengths, config)
        tree_ends = [start + config.num_draft_tokens for start in lengths]
        for row, end in zip(rows, tree_ends, strict=True):
            assert end <= pool.owned_columns(row)
            assert config.release == "finish" or pool.owned_columns(row) < end + page_size
        lengths = [start + drafts + 1 for start in lengths]
        own_committed(pool, rows, lengths, config)
        for row, end in zip(rows, lengths, strict=True):
            assert end <= pool.owned_columns(row)
            assert config.release == "finish" or pool.owned_columns(row) < end + page_size
        pool.audit()
    for row in rows:
        pool.close(row)
    assert pool.audit() == {"slots": 2 * width, "free": 2 * width, "owned": 0, "requests": 0}


@given(rounds())
def test_release_finish_never_gives_back_or_moves_a_slot(case):
    config, length, accepted = case
    config = SpecConfig(config.topk, config.num_steps, config.num_draft_tokens, config.page_size, release="finish")
    width = config.reserved_columns(length + 5 * (config.num_steps + 1))
    pool = make_pool(width, config.page_size, 1, width)
    row = pool.open()
    for drafts in accepted:
        before = pool.req_to_token[row].clone()
        own_lanes(pool, [row], [length], config)
        own_tree(pool, [row], [length], config)
        length += drafts + 1
        own_committed(pool, [row], [length], config)
        owned = before >= 0
        assert torch.equal(pool.req_to_token[row][owned], before[owned])


def test_release_round_keeps_the_slots_of_the_prefix():
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=P, release="round")
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, 6)
    prefix = pool.req_to_token[row, :6].tolist()
    own_lanes(pool, [row], [6], config)
    assert pool.owned_columns(row) == 12  # 4 + 2 lanes of one page: tail 2 and 2 steps
    own_tree(pool, [row], [6], config)
    assert pool.owned_columns(row) == 12  # 6 + 5 nodes
    own_committed(pool, [row], [7], config)
    assert pool.owned_columns(row) == 8
    assert pool.req_to_token[row, :6].tolist() == prefix
