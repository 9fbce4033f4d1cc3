"""Every corruption of a pool's books is found by its audit."""

import pytest
import torch

from specsim.core.pool import KVBuffer, KVLayout, KVPool

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=3)


P = 4


def make_pool(num_slots: int = 40, page_size: int = P, num_requests: int = 3, width: int = 32) -> KVPool:
    return KVPool(KVBuffer(LAYOUT, num_slots, torch.float32), None, page_size, num_requests, width)


def busy_pool() -> KVPool:
    """Pages 0 to 2 are row 0's, with 6 committed columns; pages 3 and 4 row 1's."""
    pool = make_pool()
    for columns in (9, 5):
        pool.reserve(pool.open(), columns)
    pool.settle(0, 6)
    pool.audit()
    return pool


def page_is_free_twice(pool):
    pool._allocator._free.append(pool._allocator._free[0])


def page_is_owned_and_free(pool):
    pool._allocator._free.append(pool._pages[0][0])


def page_was_freed_under_its_owner(pool):
    pool._allocator.free([pool._pages[0][0]])


def page_has_two_owners(pool):
    pool._pages[1][0] = pool._pages[0][0]
    pool.req_to_token[1, :P] = pool.req_to_token[0, :P]


def page_is_twice_in_one_request(pool):
    """Both places are committed and counted, so that only the request itself is wrong."""
    pool._allocator.free([pool._pages[0][1]])
    pool._allocator.hold([pool._pages[0][0]])
    pool._pages[0][1] = pool._pages[0][0]
    pool._committed[0] = 8
    pool.req_to_token[0, P : 2 * P] = pool.req_to_token[0, :P]


def page_is_shared_before_it_is_committed(pool):
    """Row 0 has 6 committed columns: its second page is still being written."""
    pool.share(pool.open(), pool.pages(0)[:2])


def page_is_kept_before_it_is_committed(pool):
    pool.keep(pool.pages(0)[1:2])


def page_that_was_shared_is_taken_for_uncommitted(pool):
    pool.share(pool.open(), pool.pages(0)[:1])
    pool._committed[0] = 3


def page_is_shared_at_another_place(pool):
    """Both rows have committed it, but as their first page and as their second."""
    row = pool.open()
    pool.reserve(row, P)
    pool._allocator.hold(pool.pages(0)[:1])
    pool._own(row, pool.pages(0)[:1])
    pool.settle(row, 2 * P)


def page_is_kept_without_being_held(pool):
    pool._kept.add(9)


def page_is_kept_twice(pool):
    pool.keep(pool.pages(0)[:1])
    pool.keep(pool.pages(0)[:1])


def page_is_dropped_that_nobody_kept(pool):
    pool.drop(pool.pages(0)[:1])


def page_is_dropped_from_the_count_only(pool):
    pool.keep(pool.pages(0)[:1])
    pool._allocator.free(pool.pages(0)[:1])


def page_leaks_from_the_free_list(pool):
    pool._allocator._free.popleft()


def page_leaks_from_a_request(pool):
    pool._pages[1].pop()
    pool.req_to_token[1, P : 2 * P] = -1


def page_leaks_from_those_kept(pool):
    pool.keep(pool.pages(0)[:1])
    pool.close(0)
    pool._kept.clear()


def request_is_forgotten(pool):
    del pool._pages[1], pool._committed[1]
    pool._free_rows.append(1)
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
    del pool._committed[1]
    pool._free_rows.append(1)


def free_page_does_not_exist(pool):
    pool._allocator._free[0] = 99


def free_list_has_a_page_too_many(pool):
    pool._allocator._free.append(99)


def page_is_free_and_held_by_nobody_known(pool):
    pool._allocator.hold([9])


def row_is_free_and_open(pool):
    pool._free_rows.append(0)


def row_is_lost(pool):
    pool._free_rows.clear()


def more_is_committed_than_owned(pool):
    pool._committed[0] = 13


CORRUPTIONS = {
    page_is_free_twice: "a page is twice in the free list",
    page_is_owned_and_free: r"pages that are held are in the free list: \[0\]",
    page_was_freed_under_its_owner: "page 0 is counted 0 times and held by row 0",
    page_has_two_owners: "page 0 is counted 1 times and held by row 0 and row 1",
    page_is_twice_in_one_request: "page 0 is shared by row 0 and row 0 where it may be written",
    page_is_shared_before_it_is_committed: "page 1 is shared by row 0 and row 2 where it may be written",
    page_is_kept_before_it_is_committed: "page 1 is shared by row 0 and whoever keeps it where it may be written",
    page_that_was_shared_is_taken_for_uncommitted: "page 0 is shared by row 0 and row 2 where it may be written",
    page_is_shared_at_another_place: "page 0 is shared by row 0 and row 2 where it may be written",
    page_is_kept_without_being_held: "page 9 is counted 0 times and held by whoever keeps it",
    page_is_kept_twice: "page 0 is counted 3 times and held by row 0 and whoever keeps it",
    page_is_dropped_that_nobody_kept: "page 0 is counted 0 times and held by row 0",
    page_is_dropped_from_the_count_only: "page 0 is counted 1 times and held by row 0 and whoever keeps it",
    page_leaks_from_the_free_list: r"pages leaked, neither free nor held: \[5\]",
    page_leaks_from_a_request: r"pages leaked, neither free nor held: \[4\]",
    page_leaks_from_those_kept: r"pages leaked, neither free nor held: \[0\]",
    request_is_forgotten: r"pages leaked, neither free nor held: \[3, 4\]",
    table_points_elsewhere: "req_to_token of row 0 disagrees with its pages at column 5",
    table_lost_a_column: "req_to_token of row 1 disagrees with its pages at column 7",
    tables_of_two_requests_are_swapped: "req_to_token of row 0 disagrees with its pages at column 0",
    released_column_is_still_in_the_table: "req_to_token of row 0 disagrees with its pages at column 8",
    closed_row_is_still_in_the_table: "req_to_token of row 1 disagrees with its pages at column 0",
    free_page_does_not_exist: r"pages leaked, neither free nor held: \[5\]",
    free_list_has_a_page_too_many: r"pages that the pool does not have are in the free list: \[99\]",
    page_is_free_and_held_by_nobody_known: "pages that are free are counted as held: page 9",
    row_is_free_and_open: "row leaked or in use twice",
    row_is_lost: "row leaked or in use twice",
    more_is_committed_than_owned: "row 0 owns .* and has committed",
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda function: function.__name__)
def test_audit_catches(corrupt):
    pool = busy_pool()
    corrupt(pool)
    with pytest.raises(AssertionError, match=CORRUPTIONS[corrupt]):
        pool.audit()
