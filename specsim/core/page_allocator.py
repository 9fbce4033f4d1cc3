"""Whole pages of slots, with the free ones and the number of holders of each."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


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
