"""The only mutable state: KV buffers, the map from logical columns to slots, and the page allocator.

Target and draft buffers are separate but share slot ids and `req_to_token`. Only methods change them: `open`, `share`,
`reserve`, `record`, `write`, `move`, `mark_committed`, `release`, `close`; and `keep` and `drop` for pages that outlive
their requests.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch

from specsim.core.columns import lane_stride, prefix_tail
from specsim.core.config import SpecConfig, ceil_to
from specsim.core.errors import InputError
from specsim.core.kv_buffer import FeatureRing, KVBuffer, KVLayout, SideOutputs
from specsim.core.page_pool import Account, OutOfSlots, PageAllocator, PagePool
from specsim.core.state import dtype_name, upload

__all__ = ["Account", "KVBuffer", "KVLayout", "KVPool", "OutOfSlots", "PageAllocator"]


class KVPool(PagePool):
    """KV of all requests, with tables wide enough for max_len and two rounds' reservation (sglang#26972)."""

    @torch.inference_mode(False)
    def __init__(
        self,
        target: KVBuffer,
        draft: KVBuffer | None,
        page_size: int,
        num_requests: int,
        width: int,
        recent: FeatureRing | None = None,
        side: SideOutputs | None = None,
    ) -> None:
        num_slots = target.keys.shape[1]
        if num_slots % page_size:
            raise InputError("num_slots", num_slots, f"a multiple of the page size, {page_size}")
        device = target.keys.device
        self.target = target
        self.draft = draft  # None where the drafter keeps no KV
        self.has_draft_kv = draft is not None
        self.recent = recent  # None where the drafter needs no features of earlier positions
        self.side = SideOutputs({}, num_slots) if side is None else side
        # i64 [requests, width], slot of every owned logical column, -1 elsewhere
        self.req_to_token = torch.full((num_requests, ceil_to(width, page_size)), -1, dtype=torch.int64, device=device)
        # i64 [requests, width], tokens 0..L of each request; L is the bonus token's
        self.token_ids = torch.full((num_requests, width), -1, dtype=torch.int64, device=device)
        super().__init__(num_slots, page_size, num_requests, self.req_to_token.shape[1])

    def __repr__(self) -> str:
        pages = f"{self._allocator.num_free} of {self._allocator.limit} pages of {self.page_size} slots free"
        rows = [
            f"\n  row {row}: {self._committed[row]} committed columns on pages {', '.join(map(str, pages))}"
            for row, pages in self._pages.items()
        ]
        dtype = dtype_name(self.target.keys.dtype)
        return f"KVPool: {pages}; {dtype} on {self.req_to_token.device}{''.join(rows)}"

    def open(self) -> int:
        row = super().open()
        if self.recent is not None:
            self.recent.clear(row)
        return row

    def _write(self, grown: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write pages to the request table, by (row, number of the first page in it, pages)."""
        entries = [(row, first + index, page) for row, first, pages in grown for index, page in enumerate(pages)]
        if not entries:
            return
        rows, numbers, pages = torch.tensor(entries, dtype=torch.int64).T[:, :, None]
        within = torch.arange(self.page_size)
        columns, slots = numbers * self.page_size + within, pages * self.page_size + within
        columns_and_slots = torch.stack([rows.expand_as(columns), columns, slots]).flatten(1)
        at, column, slot = upload(columns_and_slots, self.req_to_token.device)
        self.req_to_token[at, column] = slot

    def release(self, row: int, columns: int = 0) -> None:
        super().release(row, columns)
        self.req_to_token[row, self.owned_columns(row) :] = -1

    def close(self, row: int) -> None:
        super().close(row)
        self.token_ids[row] = -1

    def record(self, rows: torch.Tensor | int, columns: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record the tokens at logical columns of requests."""
        self.token_ids[rows, columns] = tokens.long()

    def record_prefix(self, row: int, token_ids: Sequence[int]) -> None:
        device = self.token_ids.device
        tokens = upload(torch.tensor(token_ids, dtype=torch.int64), device)
        self.record(row, torch.arange(len(token_ids), device=device), tokens)

    def side_outputs(self, row: int) -> dict[str, torch.Tensor]:
        slots = self.req_to_token[row]
        return self.side.read(slots[slots >= 0])

    def take_snapshot(self) -> None:
        """Copy the drafter's KV, if a snapshot of it is kept, before draft-extend writes over the lanes."""
        if self.draft is not None and self.draft.snapshot is not None:
            self.draft.snapshot.copy_(self.draft)

    def slots(self, rows: torch.Tensor | int, columns: torch.Tensor) -> torch.Tensor:
        """Look up the slots of columns, of the broadcast shape.

        Raises IndexError for a column that is not owned.
        """
        slots = self.req_to_token[rows, columns]
        if bool((slots < 0).any()):
            row, column = (index.expand_as(slots)[slots < 0][0] for index in (torch.as_tensor(rows), columns))
            raise IndexError(f"row {int(row)} of the request table owns no slot at column {int(column)}")
        return slots

    def copy_(self, source: "KVPool") -> None:
        """Copy another pool of the same shape in place: KV, tables and page counts."""
        self.target.copy_(source.target)
        if self.draft is not None and source.draft is not None:
            self.draft.copy_(source.draft)
        if self.recent is not None and source.recent is not None:
            self.recent.copy_(source.recent)
        self.side.copy_(source.side)
        self.req_to_token.copy_(source.req_to_token)
        self.token_ids.copy_(source.token_ids)
        for name in ("_allocator", "_pages", "_committed", "_cached_pages", "_free_rows"):
            setattr(self, name, deepcopy(getattr(source, name)))

    def audit(self) -> dict[str, int]:
        """Check every slot and return the usage, as PagePool.audit does, and that tables agree with the pages."""
        usage = super().audit()
        self._check_tables()
        return usage

    def _check_tables(self) -> None:
        expected = torch.full_like(self.req_to_token, -1, device="cpu")
        for row, pages in self._pages.items():
            slots = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size + torch.arange(self.page_size)
            expected[row, : slots.numel()] = slots.flatten()
        wrong = (self.req_to_token.cpu() != expected).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise AssertionError(f"req_to_token of row {row} disagrees with its pages at column {column}")


def lane_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, S] of the KV of lane k at step s.

    Lanes follow each other after L. With pages and several lanes, each lane starts on its own pages, after room for a
    copy of the prefix's tail; lane 0's first page is the prefix's last.
    """
    first = seq_len + lane_stride(seq_len, config) * torch.arange(config.topk)
    return first[:, None] + torch.arange(config.num_steps)


def tail_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, T] of each lane's copy of the prefix's last T tokens.

    T is 0 where lanes share the prefix.
    """
    tail = prefix_tail(seq_len, config)
    return lane_columns(seq_len, config)[:, :1] - tail + torch.arange(tail)
