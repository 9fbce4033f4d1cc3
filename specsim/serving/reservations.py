"""Owners of KV: admitted requests, sessions that wait for their next turn, cached prefixes."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from specsim.core.columns import round_columns
from specsim.core.config import SpecConfig
from specsim.core.page_pool import PagePool
from specsim.serving.requests import Request

if TYPE_CHECKING:
    from specsim.serving.prefix import PrefixTree


class RoundPages(dict[int, int]):
    """Most pages that a request owns in its next round, by its length, under any of several settings."""

    def __init__(self, settings: Sequence[SpecConfig], ahead: int) -> None:
        super().__init__()
        self._settings = settings
        self._ahead = ahead  # columns that the drafter needs after the committed ones

    def __missing__(self, length: int) -> int:
        columns = max(round_columns(length, config, self._ahead) for config in self._settings)
        self[length] = pages = -(-columns // self._settings[0].page_size)
        return pages


class Reservations:
    """Reservation, growth and release of requests' slots in one pool.

    Slots that no admitted request uses are freed first: cached prefixes, then the sessions that finished longest ago.
    """

    def __init__(
        self, pools: PagePool, settings: Sequence[SpecConfig], prefix_cache: bool, ahead: int = 0, lookahead: int = 0
    ) -> None:
        self._pools = pools
        self._config = settings[0]
        self._ahead = ahead  # columns that the drafter needs after the committed ones
        self._tree = _prefix_tree(pools, lookahead) if prefix_cache else None
        self._sessions: dict[int, Request] = {}
        self._rows: set[int] = set()  # of requests and sessions
        # The engine switches between the settings: reservations hold the largest need of all.
        self._round_pages = RoundPages(settings, ahead)
        self.evicted_pages = 0

    def rejection_reason(self, request: Request) -> str | None:
        """Explain why a request can never run in this pool, even an empty one, None if it can."""
        length = len(request.prompt_ids)
        most = self._config.length_limit - 1
        if length > most:
            return f"a prompt of {length} tokens; at most {most}, one less than max_len, can run"
        lengths = range(length, length + max(1, request.max_tokens - 1))  # at the start of a round
        needed = max(map(self._round_pages.__getitem__, lengths)) * self._pools.page_size
        if needed > self._pools.num_slots:
            size = f"{length} prompt tokens and {request.max_tokens} new ones"
            return f"{size} need {needed} slots, and the pool has {self._pools.num_slots}"
        return None

    def admit(self, request: Request, admitted_requests: Collection[Request]) -> bool:
        """Give a request a row and the columns of its prefill, under release `finish` also of its first rounds.

        Returns False, and evicts nothing, if its next round does not fit together with those of the admitted ones.
        """
        session = None if request.continues is None else self._sessions.get(request.continues)
        pages = self._pools.pages(session.row) if session else self._match(request)
        if not self._can_fit(admitted_requests, pages, self._round_pages[request.prefill_len]):
            return False
        if session is None and not self._free_a_row():
            return False
        if session:
            del self._sessions[session.request_id]
        request.row = session.row if session else self._open(request)
        self._rows.add(request.row)
        self.make_room([*admitted_requests, request])
        self._reserve_prefill(request)
        if session:
            session.row = -1
        return True

    def _reserve_prefill(self, request: Request) -> None:
        is_kept = self._config.release == "finish"
        self._pools.reserve(request.row, self.least_slots(request) if is_kept else request.prefill_len + self._ahead)

    def _open(self, request: Request) -> int:
        row = self._pools.open()
        self._pools.share(row, self._match(request))
        if committed := self._pools.committed_columns(row):
            self._pools.record_prefix(row, request.known_ids[:committed])
        return row

    def _match(self, request: Request) -> list[int]:
        """Find the cached pages of a request's prefix.

        At least one column is left to compute, as a round needs its hidden state.
        """
        return [] if self._tree is None else self._tree.match(request.known_ids, request.prefill_len - 1)

    def _free_a_row(self) -> bool:
        return bool(self._pools.free_rows) or self._end_oldest_session()

    def make_room(self, admitted_requests: Collection[Request]) -> bool:
        """Evict prefixes and end sessions until the next round of these requests fits, or return False if it cannot.

        It evicts nothing in that case. admitted_requests: every request with a row, without the sessions.
        """
        if self.growth(admitted_requests) * self._pools.page_size <= self._pools.free_slots:
            return True
        if not self._can_fit(admitted_requests):
            return False
        while (missing := self.growth(admitted_requests) - self._pools.free_slots // self._pools.page_size) > 0:
            evicted = self._tree.evict(missing) if self._tree is not None else 0
            self.evicted_pages += evicted
            if not evicted and not self._end_oldest_session():
                raise AssertionError(f"{missing} pages are missing for rounds that fit")
        return True

    def _can_fit(self, admitted_requests: Collection[Request], pages: Collection[int] = (), needed: int = 0) -> bool:
        """Check whether the next rounds of admitted requests fit within the limit once all that can be freed is free.

        pages, needed: a further request's first pages, and the number of all pages that it needs.
        """
        growth = self.growth(admitted_requests) + max(0, needed - len(pages))
        if growth * self._pools.page_size <= self._pools.free_slots:
            return True
        if self._tree is None and not self._sessions:  # nothing can be freed
            return False
        held = {*pages, *(page for request in admitted_requests for page in self._pools.pages(request.row))}
        if self._tree is not None:
            held |= self._tree.pages_above(held)
        return (growth + len(held)) * self._pools.page_size <= self._pools.usable_slots

    def least_slots(self, request: Request) -> int:
        """Count the slots that a request needs for its prefill and its next round."""
        return self._round_pages[request.prefill_len] * self._pools.page_size

    def growth(self, admitted_requests: Collection[Request]) -> int:
        """Count the pages that the next round of these requests needs in addition to theirs."""
        needed, pages = self._round_pages, self._pools.pages_by_row
        missing = [needed[request.prefill_len] - len(pages[request.row]) for request in admitted_requests]
        return sum([count for count in missing if count > 0])

    def reserve(self, requests: Collection[Request]) -> None:
        """Reserve before a round, under release `finish`, two rounds beyond the length that the host knows."""
        if self._config.release == "finish":
            needed, pages = self._round_pages, self._pools.pages_by_row
            growing = [request for request in requests if needed[request.prefill_len] > len(pages[request.row])]
            self._pools.reserve_all([(request.row, self.least_slots(request)) for request in growing])

    def mark_committed(self, request: Request, columns: int) -> None:
        """Mark a request's first columns as committed, and add their pages to the prefix cache."""
        self._pools.mark_committed(request.row, columns)
        if self._tree is not None:
            self._tree.insert(request.known_ids, columns, self._pools.pages(request.row))

    def committed(self, request: Request) -> int:
        """Count an admitted request's columns whose KV is final as far as the host knows."""
        return self._pools.committed_columns(request.row)

    def usage(self) -> dict[str, int]:
        """Count slots by use as KVPool.usage does, by rows where no page has two holders."""
        pools = self._pools
        withheld = pools.num_slots - pools.usable_slots
        free = pools.free_slots + withheld
        held = sum(map(pools.owned_columns, self._rows))
        if self._tree is not None or held + free != pools.num_slots:
            return pools.usage()
        committed = sum(map(pools.committed_columns, self._rows))
        counts = {"slots": pools.num_slots, "free": free, "reserved": held - committed, "committed": committed}
        return counts | {"cached": 0, "withheld": withheld, "requests": len(self._rows)}

    def keep_side_outputs(self, request: Request) -> None:
        """Keep side outputs of all columns before a preemption, as a result that is unread may end the request."""
        request.side_outputs = self._pools.side_outputs(request.row)

    def release(self, request: Request, keep_session: bool = False) -> None:
        """Close a request's row, or keep its committed columns as a session for the next turn."""
        if keep_session:
            self._pools.release(request.row, self.committed(request))
            self._sessions[request.request_id] = request
        else:
            self._pools.close(request.row)
            self._rows.remove(request.row)
            request.row = -1

    def end_session(self, request_id: int) -> bool:
        """Free the KV that a finished request kept for its next turn, or return False if there is none."""
        request = self._sessions.pop(request_id, None)
        if request:
            self.release(request)
        return request is not None

    def _end_oldest_session(self) -> bool:
        return bool(self._sessions) and self.end_session(next(iter(self._sessions)))

    def close(self) -> None:
        """End all sessions and drop all prefixes."""
        while self._end_oldest_session():
            pass
        if self._tree is not None:
            self._tree.clear()


def _prefix_tree(pools: PagePool, lookahead: int) -> "PrefixTree":
    from specsim.serving.prefix import PrefixTree  # a simulated server has none

    return PrefixTree(pools, lookahead)
