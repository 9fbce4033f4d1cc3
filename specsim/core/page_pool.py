"""Pages of a pool: requests' rows and their pages, without the KV that a pool keeps in them.

core.pool has a server's KV besides. A simulated server has the pages only, and needs no torch.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specsim.core.config import ceil_to
from specsim.core.errors import InputError


class OutOfSlots(RuntimeError):
    """A reservation failed for lack of free pages, and reserved nothing."""


class PageAllocator:
    """Whole pages, allocated first in, first out, and free again when nobody holds them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.limit = num_pages  # most pages that may be in use; those beyond it are withheld
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Number of pages that may be allocated, negative while more are in use than the limit allows."""
        return self.limit - self.num_pages + len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate free pages with one holder each, or raise OutOfSlots."""
        if count > max(0, self.num_free):
            raise OutOfSlots(f"{count} pages asked for, {max(0, self.num_free)} of {self.limit} are free")
        pages = [self._free.popleft() for _ in range(count)]
        self.hold(pages)
        return pages

    def holders(self, page: int) -> int:
        """Count the holders of a page, 0 for a free one."""
        return self._holders[page]

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove a holder from each page, and free the pages without one.

        Raises ValueError for a page that is already free.
        """
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def free_pages(self) -> tuple[int, ...]:
        """List the free pages, next one first."""
        return tuple(self._free)


class Account(NamedTuple):
    """The holders of one page."""

    page: int
    rows: tuple[int, ...]  # of the request table
    is_kept: bool  # beyond the requests that filled it
    committed: int  # slots with final KV

    @property
    def holders(self) -> str:
        """Describe the holders, for errors."""
        names = [*(f"row {row}" for row in self.rows), *(["whoever keeps it"] if self.is_kept else [])]
        return " and ".join(names) or "nobody"


class PagePool:
    """Rows of requests, and the pages that each holds.

    width: most columns of a row, None for no limit. Without KV there are no tokens and no side outputs to record.
    """

    has_draft_kv = False

    def __init__(self, num_slots: int, page_size: int, num_requests: int, width: int | None = None) -> None:
        self.page_size = page_size
        self._num_rows = num_requests
        self._width = width
        self._allocator = PageAllocator(num_slots // page_size)
        self._pages: dict[int, list[int]] = {}
        self._committed: dict[int, int] = {}
        self._cached_pages: set[int] = set()
        self._free_rows = deque(range(num_requests))

    def open(self) -> int:
        """Take a row for a new request."""
        if not self._free_rows:
            raise OutOfSlots(f"all {self._num_rows} rows of the request table are in use")
        row = self._free_rows.popleft()
        self._pages[row] = []
        self._committed[row] = 0
        return row

    @property
    def pages_by_row(self) -> Mapping[int, Sequence[int]]:
        """Pages of the columns of every row in use."""
        return self._pages

    def pages(self, row: int) -> tuple[int, ...]:
        """List the pages of a request's columns, in order."""
        return tuple(self._pages[row])

    def owned_columns(self, row: int) -> int:
        """Count the columns that a request owns."""
        return len(self._pages[row]) * self.page_size

    def committed_columns(self, row: int) -> int:
        """Count the columns, from 0 on, whose KV is final as far as the host knows."""
        return self._committed[row]

    def num_pages(self, columns: int) -> int:
        """Count the pages that this number of columns fills."""
        return ceil_to(columns, self.page_size) // self.page_size

    @property
    def num_slots(self) -> int:
        """Slots of the pool, whatever the limit."""
        return self._allocator.num_pages * self.page_size

    @property
    def usable_slots(self) -> int:
        """Slots within the limit, used or free."""
        return self._allocator.limit * self.page_size

    @property
    def free_slots(self) -> int:
        """Slots that may be reserved, negative while more are in use than `limit` allows."""
        return self._allocator.num_free * self.page_size

    @property
    def free_rows(self) -> int:
        """Number of requests that can still be opened."""
        return len(self._free_rows)

    def limit(self, num_slots: int) -> None:
        """Limit the pool to a number of slots (whole pages).

        Slots in use stay until they are released.
        """
        if type(num_slots) is not int or not 0 <= num_slots <= self.num_slots:
            raise InputError("num_slots", num_slots, f"0 to the pool's {self.num_slots}")
        self._allocator.limit = num_slots // self.page_size

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Start a request that owns nothing with kept pages as its first columns, committed and never written."""
        if self._pages[row]:
            raise ValueError(f"row {row} of the request table owns columns already")
        self._allocator.hold(pages)
        self._append_pages(row, pages)
        self.mark_committed(row, self.owned_columns(row))

    def mark_committed(self, row: int, columns: int) -> None:
        """Mark a request's first columns as committed KV."""
        if columns > self.owned_columns(row):
            raise IndexError(f"row {row} of the request table owns {self.owned_columns(row)} columns, not {columns}")
        self._committed[row] = columns

    def keep(self, pages: Sequence[int]) -> None:
        """Hold committed pages beyond the requests that filled them."""
        self._allocator.hold(pages)
        self._cached_pages.update(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """Stop keeping these pages."""
        self._cached_pages.difference_update(pages)
        self._allocator.free(pages)

    def is_idle(self, page: int) -> bool:
        """Check whether a kept page belongs to no request."""
        return self._allocator.holders(page) == 1

    def reserve(self, row: int, columns: int) -> None:
        """Reserve columns until a request owns at least `columns`."""
        self.reserve_all([(row, columns)])

    def reserve_all(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Reserve columns of several requests, by (row, columns).

        Where slots run out, the requests before that have theirs.
        """
        grown: list[tuple[int, int, Sequence[int]]] = []
        try:
            for row, columns in wanted:
                if self._width is not None and columns > self._width:
                    raise OutOfSlots(f"{columns} columns asked for, a row of the request table has {self._width}")
                owned = self._pages[row]
                missing = self.num_pages(columns) - len(owned)
                if missing > 0:
                    pages = self._allocator.allocate(missing)
                    grown.append((row, len(owned), pages))
                    owned.extend(pages)
        finally:
            self._write(grown)

    def _append_pages(self, row: int, pages: Sequence[int]) -> None:
        self._write([(row, len(self._pages[row]), pages)])
        self._pages[row].extend(pages)

    def _write(self, grown: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Note pages that rows have got, by (row, number of the first page in it, pages)."""

    def record_prefix(self, row: int, token_ids: Sequence[int]) -> None:
        """Record a row's first tokens."""

    def side_outputs(self, row: int) -> dict[str, Any]:
        """Copy the side outputs of a row's columns to the host."""
        return {}

    def release(self, row: int, columns: int = 0) -> None:
        """Release every whole page beyond the first `columns` columns."""
        num_pages = self.num_pages(columns)
        pages = self._pages[row]
        self._allocator.free(pages[num_pages:])
        del pages[num_pages:]
        self._committed[row] = min(self._committed[row], self.owned_columns(row))

    def close(self, row: int) -> None:
        """End a request and free the pages that no other holds."""
        self.release(row)
        del self._pages[row], self._committed[row]
        self._free_rows.append(row)

    def accounts(self) -> list[Account]:
        """List every page in use with its holders."""
        rows: dict[int, list[int]] = {page: [] for page in sorted(self._cached_pages)}
        committed = dict.fromkeys(self._cached_pages, self.page_size)
        for row, pages in self._pages.items():
            for index, page in enumerate(pages):
                rows.setdefault(page, []).append(row)
                filled = min(self.page_size, max(0, self._committed[row] - index * self.page_size))
                committed[page] = max(committed.get(page, 0), filled)
        return [Account(page, tuple(rows[page]), page in self._cached_pages, committed[page]) for page in rows]

    def usage(self) -> dict[str, int]:
        """Count slots by use: free + reserved + committed = slots."""
        accounts = self.accounts()
        committed = sum(account.committed for account in accounts)
        return {
            "slots": self.num_slots,
            "free": len(self._allocator.free_pages()) * self.page_size,  # withheld ones included
            "reserved": len(accounts) * self.page_size - committed,  # held, and not (known to be) committed
            "committed": committed,
            "cached": len(self._cached_pages) * self.page_size,  # committed ones that outlive their requests
            "withheld": self.num_slots - self.usable_slots,  # beyond the limit
            "requests": len(self._pages),  # rows in use
        }

    def audit(self) -> dict[str, int]:
        """Check every slot and return the usage.

        Raises AssertionError where page counts disagree. Every page is either free or held by as many
        holders as its count. A page with several holders has the same index in each request, wholly among the committed
        columns, so that nobody writes it.
        """
        accounts = self.accounts()
        free = self._allocator.free_pages()
        if len(set(free)) != len(free):
            raise AssertionError("a page is twice in the free list")
        for account in accounts:
            self._check_account(account)
        held = {account.page for account in accounts}
        if both := held & set(free):
            raise AssertionError(f"pages that are held are in the free list: {sorted(both)}")
        pages = set(range(self._allocator.num_pages))
        if lost := pages - held - set(free):
            raise AssertionError(f"pages leaked, neither free nor held: {sorted(lost)}")
        if unknown := set(free) - pages:
            raise AssertionError(f"pages that the pool does not have are in the free list: {sorted(unknown)}")
        if counted := [page for page in free if self._allocator.holders(page)]:
            raise AssertionError(f"pages that are free are counted as held: page {counted[0]}")
        self._check_rows()
        return self.usage()

    def _check_account(self, account: Account) -> None:
        page = account.page
        counted = self._allocator.holders(page)
        if counted != len(account.rows) + account.is_kept:
            raise AssertionError(f"page {page} is counted {counted} times and held by {account.holders}")
        if counted > 1:
            index = self._pages[account.rows[0]].index(page)
            is_final = (index + 1) * self.page_size <= min(self._committed[row] for row in account.rows)
            in_order = all(self._pages[row][index : index + 1] == [page] for row in account.rows)
            if not (is_final and in_order and len(set(account.rows)) == len(account.rows)):
                raise AssertionError(f"page {page} is shared by {account.holders} where it may be written")

    def _check_rows(self) -> None:
        if sorted([*self._free_rows, *self._pages]) != list(range(self._num_rows)):
            raise AssertionError(f"row leaked or in use twice: free {list(self._free_rows)}, open {list(self._pages)}")
        for row, columns in self._committed.items():
            if not 0 <= columns <= self.owned_columns(row):
                raise AssertionError(f"row {row} owns {self.owned_columns(row)} columns and has committed {columns}")
