"""Every corruption of a pool's accounting fails its audit."""

import pytest

from .pools import busy_pool

# Code that corrupts `pool`, its page allocator `pages` or its request table `table`, and the message of the audit.
CORRUPTIONS = {
    "page is free twice": ("pages._free.append(pages._free[0])", "a page is twice in the free list"),
    "page is owned and free": (
        "pages._free.append(pool._pages[0][0])",
        r"pages that are held are in the free list: \[0\]",
    ),
    "page was freed under its owner": (
        "pages.free([pool._pages[0][0]])",
        "page 0 is counted 0 times and held by row 0",
    ),
    "page has two owners": (
        "pool._pages[1][0] = pool._pages[0][0]; table[1, :4] = table[0, :4]",
        "page 0 is counted 1 times and held by row 0 and row 1",
    ),
    # Both places are committed and counted, so that only the request itself is wrong.
    "page is twice in one request": (
        "pages.free([pool._pages[0][1]]); pages.hold([pool._pages[0][0]]); pool._pages[0][1] = pool._pages[0][0]; "
        "pool._committed[0] = 8; table[0, 4:8] = table[0, :4]",
        "page 0 is shared by row 0 and row 0 where it may be written",
    ),
    # Row 0 has 6 committed columns: its second page is still being written.
    "page is shared before it is committed": (
        "pool.share(pool.open(), pool.pages(0)[:2])",
        "page 1 is shared by row 0 and row 2 where it may be written",
    ),
    "page is kept before it is committed": (
        "pool.keep(pool.pages(0)[1:2])",
        "page 1 is shared by row 0 and whoever keeps it where it may be written",
    ),
    "page that was shared is taken for uncommitted": (
        "pool.share(pool.open(), pool.pages(0)[:1]); pool._committed[0] = 3",
        "page 0 is shared by row 0 and row 2 where it may be written",
    ),
    # Both rows have committed it, but as their first page and as their second.
    "page is shared at another place": (
        "row = pool.open(); pool.reserve(row, 4); pages.hold(pool.pages(0)[:1]); "
        "pool._append_pages(row, pool.pages(0)[:1]); pool.mark_committed(row, 8)",
        "page 0 is shared by row 0 and row 2 where it may be written",
    ),
    "page is kept without being held": (
        "pool._cached_pages.add(9)",
        "page 9 is counted 0 times and held by whoever keeps it",
    ),
    "page is kept twice": (
        "pool.keep(pool.pages(0)[:1]); pool.keep(pool.pages(0)[:1])",
        "page 0 is counted 3 times and held by row 0 and whoever keeps it",
    ),
    "page is dropped that nobody kept": ("pool.drop(pool.pages(0)[:1])", "page 0 is counted 0 times and held by row 0"),
    "page is dropped from the count only": (
        "pool.keep(pool.pages(0)[:1]); pages.free(pool.pages(0)[:1])",
        "page 0 is counted 1 times and held by row 0 and whoever keeps it",
    ),
    "page leaks from the free list": ("pages._free.popleft()", r"pages leaked, neither free nor held: \[5\]"),
    "page leaks from a request": (
        "pool._pages[1].pop(); table[1, 4:8] = -1",
        r"pages leaked, neither free nor held: \[4\]",
    ),
    "page leaks from those kept": (
        "pool.keep(pool.pages(0)[:1]); pool.close(0); pool._cached_pages.clear()",
        r"pages leaked, neither free nor held: \[0\]",
    ),
    "request is forgotten": (
        "del pool._pages[1], pool._committed[1]; pool._free_rows.append(1); table[1] = -1",
        r"pages leaked, neither free nor held: \[3, 4\]",
    ),
    "table points elsewhere": ("table[0, 5] += 1", "req_to_token of row 0 disagrees with its pages at column 5"),
    "table lost a column": ("table[1, 7] = -1", "req_to_token of row 1 disagrees with its pages at column 7"),
    "tables of two requests are swapped": (
        "table[:2] = table[:2].flip(0)",
        "req_to_token of row 0 disagrees with its pages at column 0",
    ),
    "released column is still in the table": (
        "pages.free([pool._pages[0].pop()])",
        "req_to_token of row 0 disagrees with its pages at column 8",
    ),
    "closed row is still in the table": (
        "pages.free(pool._pages.pop(1)); del pool._committed[1]; pool._free_rows.append(1)",
        "req_to_token of row 1 disagrees with its pages at column 0",
    ),
    "free page does not exist": ("pages._free[0] = 99", r"pages leaked, neither free nor held: \[5\]"),
    "free list has a page too many": (
        "pages._free.append(99)",
        r"pages that the pool does not have are in the free list: \[99\]",
    ),
    "page is free and held by nobody known": ("pages.hold([9])", "pages that are free are counted as held: page 9"),
    "row is free and open": ("pool._free_rows.append(0)", "row leaked or in use twice"),
    "row is lost": ("pool._free_rows.clear()", "row leaked or in use twice"),
    "more is committed than owned": ("pool._committed[0] = 13", "row 0 owns .* and has committed"),
}


@pytest.mark.parametrize(("code", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_audit_catches(code, message):
    pool = busy_pool()
    exec(code, {"pool": pool, "pages": pool._allocator, "table": pool.req_to_token})
    with pytest.raises(AssertionError, match=message):
        pool.audit()
