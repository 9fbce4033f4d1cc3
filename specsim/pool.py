"""The only mutable state: KV buffers, the map from logical columns to slots, and the allocator of pages.

Target and draft buffers are separate but share slot ids and `req_to_token`. They change by verbs only: `open`,
`reserve`, `record`, `write`, `move`, `release`, `close`.
"""

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from specsim.config import InputError, SpecConfig, ceil_to


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV: num_layers × (slots) × num_kv_heads × head_dim, keys and values alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KVBuffer:
    """Keys and values of one model, [layers, slots, kv heads, D] each."""

    def __init__(self, layout: KVLayout, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        shape = (layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots_R: torch.Tensor, key_RAD: torch.Tensor, value_RAD: torch.Tensor) -> None:
        """Write rows to their slots; a row with slot -1 writes nothing."""
        kept = slots_R >= 0
        self.keys[layer, slots_R[kept]] = key_RAD[kept]
        self.values[layer, slots_R[kept]] = value_RAD[kept]

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy the content of slots `source` to slots `destination` in every layer; all is read before any is
        written.
        """
        keys, values = self.keys[:, source], self.values[:, source]
        self.keys[:, destination], self.values[:, destination] = keys, values

    def copy_(self, source: "KVBuffer") -> None:
        """Take over another buffer's content, from any device and dtype."""
        self.keys.copy_(source.keys)
        self.values.copy_(source.values)


class OutOfSlots(RuntimeError):
    """The pool has fewer free pages than a reservation needs; nothing was reserved."""


class PageAllocator:
    """Whole pages, handed out first in, first out."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfSlots(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)


class KVPool:
    """KV of all requests.

    target, draft: KVBuffer (draft is None where the drafter keeps no KV). req_to_token: i64 [requests, width], slot
    of every owned logical column, -1 elsewhere. token_ids: i64 [requests, width], tokens 0..L of each request (L is
    the bonus). Rows are wide enough for max_len plus what two rounds reserve (sglang#26972).
    """

    def __init__(self, target: KVBuffer, draft: KVBuffer | None, page_size: int, num_requests: int, width: int):
        num_slots = target.keys.shape[1]
        if num_slots % page_size:
            raise InputError("num_slots", num_slots, f"a multiple of the page size, {page_size}")
        device = target.keys.device
        self.target, self.draft, self.page_size = target, draft, page_size
        self.req_to_token = torch.full((num_requests, ceil_to(width, page_size)), -1, dtype=torch.int64, device=device)
        self.token_ids = torch.full((num_requests, width), -1, dtype=torch.int64, device=device)
        self._allocator = PageAllocator(num_slots // page_size)
        self._pages: dict[int, list[int]] = {}
        self._free_rows = deque(range(num_requests))

    def open(self) -> int:
        """Take a row of the tables for a new request."""
        if not self._free_rows:
            raise OutOfSlots(f"all {len(self.req_to_token)} rows of the request table are in use")
        row = self._free_rows.popleft()
        self._pages[row] = []
        return row

    def owned_columns(self, row: int) -> int:
        return len(self._pages[row]) * self.page_size

    def _num_pages(self, columns: int) -> int:
        return ceil_to(columns, self.page_size) // self.page_size

    @property
    def free_slots(self) -> int:
        return self._allocator.num_free * self.page_size

    def reserve(self, row: int, columns: int) -> None:
        """Own at least `columns` columns; never gives any back."""
        pages = self._pages[row]
        if columns > self.req_to_token.shape[1]:
            width = self.req_to_token.shape[1]
            raise OutOfSlots(f"{columns} columns asked for, a row of the request table has {width}")
        first, missing = self.owned_columns(row), max(0, self._num_pages(columns) - len(pages))
        new = self._allocator.allocate(missing)
        pages.extend(new)
        slots = torch.tensor(new, dtype=torch.int64)[:, None] * self.page_size + torch.arange(self.page_size)
        self.req_to_token[row, first : self.owned_columns(row)] = slots.flatten().to(self.req_to_token.device)

    def release(self, row: int, columns: int = 0) -> None:
        """Give back every whole page beyond the first `columns` columns."""
        kept, pages = self._num_pages(columns), self._pages[row]
        self._allocator.free(pages[kept:])
        del pages[kept:]
        self.req_to_token[row, self.owned_columns(row) :] = -1

    def close(self, row: int) -> None:
        """End a request: everything it owns is free again."""
        self.release(row)
        self.token_ids[row] = -1
        del self._pages[row]
        self._free_rows.append(row)

    def record(self, rows: torch.Tensor | int, columns: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the tokens that stand at logical columns of requests."""
        self.token_ids[rows, columns] = tokens.long()

    def slots(self, rows: torch.Tensor | int, columns: torch.Tensor) -> torch.Tensor:
        """Slots of logical columns of requests, of the broadcast shape; a column that is not owned is an error."""
        slots = self.req_to_token[rows, columns]
        if bool((slots < 0).any()):
            row, column = (index.expand_as(slots)[slots < 0][0] for index in (torch.as_tensor(rows), columns))
            raise IndexError(f"row {int(row)} of the request table owns no slot at column {int(column)}")
        return slots

    def copy_(self, source: "KVPool") -> None:
        """Take over everything another pool of the same shape holds, in place: content, tables and books."""
        self.target.copy_(source.target)
        if self.draft is not None:
            self.draft.copy_(source.draft)
        self.req_to_token.copy_(source.req_to_token)
        self.token_ids.copy_(source.token_ids)
        self._allocator = deepcopy(source._allocator)
        self._pages, self._free_rows = deepcopy(source._pages), source._free_rows.copy()

    def audit(self) -> dict[str, int]:
        """Account for every page: free or owned by exactly one request, tables and lists agreeing; raises if not."""
        owner = dict.fromkeys(self._allocator.free_pages(), -1)
        if len(owner) != self._allocator.num_free:
            raise AssertionError("a page is twice in the free list")
        expected = torch.full_like(self.req_to_token, -1).cpu()
        for row, pages in self._pages.items():
            for index, page in enumerate(pages):
                if page in owner:
                    raise AssertionError(
                        f"page {page} of request row {row} is also owned by row {owner[page]} (-1: free)"
                    )
                owner[page] = row
                columns = slice(index * self.page_size, (index + 1) * self.page_size)
                expected[row, columns] = torch.arange(page * self.page_size, (page + 1) * self.page_size)
        if owner.keys() != set(range(self._allocator.num_pages)):
            raise AssertionError(
                f"pages leaked or unknown: {sorted(owner.keys() ^ set(range(self._allocator.num_pages)))}"
            )
        wrong = (self.req_to_token.cpu() != expected).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise AssertionError(f"req_to_token of row {row} disagrees with its pages at column {column}")
        return {
            "slots": self._allocator.num_pages * self.page_size,
            "free": self.free_slots,
            "owned": sum(map(self.owned_columns, self._pages)),
            "requests": len(self._pages),
        }


def prefix_tail(seq_len: int, config: SpecConfig) -> int:
    """Tokens of the prefix's unfinished page that every lane keeps a copy of: L mod P, 0 where lanes share it."""
    return 0 if config.lanes_share_prefix else seq_len % config.page_size


def lane_stride(seq_len: int, config: SpecConfig) -> int:
    """Columns from one draft lane's first slot to the next lane's: S, or whole pages where lanes own pages."""
    if config.lanes_share_prefix:
        return config.num_steps
    return ceil_to(prefix_tail(seq_len, config) + config.num_steps, config.page_size)


def lane_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, S] in which lane k writes its KV of step s.

    Lanes follow each other after L; with pages and several lanes each lane starts on pages of its own, after room for
    a copy of the prefix's tail, and lane 0's first page is the prefix's last.
    """
    first = seq_len + lane_stride(seq_len, config) * torch.arange(config.topk)
    return first[:, None] + torch.arange(config.num_steps)


def tail_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, T] of each lane's copy of the prefix's last T tokens; T = 0 where lanes share the prefix."""
    tail = prefix_tail(seq_len, config)
    return lane_columns(seq_len, config)[:, :1] - tail + torch.arange(tail)


def own_lanes(pools: KVPool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig) -> None:
    """Before the draft phase: own two rounds' need (release `finish`) or borrow this round's lanes (`round`)."""
    for row, length in zip(rows, seq_lens, strict=True):
        lanes_end = length - prefix_tail(length, config) + config.topk * lane_stride(length, config)
        pools.reserve(row, config.reserved_columns(length) if config.release == "finish" else lanes_end)


def own_tree(pools: KVPool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig) -> None:
    """After the draft phase: under release `round` return the lanes and take the columns of the tree."""
    if config.release == "round":
        for row, length in zip(rows, seq_lens, strict=True):
            pools.release(row, length)
        for row, length in zip(rows, seq_lens, strict=True):
            pools.reserve(row, length + config.num_draft_tokens)


def own_committed(pools: KVPool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig) -> None:
    """After the commit (seq_lens counts it): under release `round` keep the committed columns only."""
    if config.release == "round":
        for row, length in zip(rows, seq_lens, strict=True):
            pools.release(row, length)
