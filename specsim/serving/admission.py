"""Queue of a scheduler's requests, admission to prefill and the running batch, and preemption."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.serving.requests import Request
from specsim.serving.reservations import Reservations
from specsim.serving.trace import Preemption

if TYPE_CHECKING:
    from specsim.serving.runner import Runner


class Queue:
    """Submitted requests by id, and the conversations that they form."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # all submitted requests
        self.coming: list[Request] = []  # still to arrive
        self.waiting: list[Request] = []  # arrived or preempted, without a row, in the order of service
        self.has_aborts = False  # whether a request is aborted at some step
        self._has_turns = False  # whether a request continues another
        self._order: dict[int, int] = {}  # position of each id among the submissions

    def submit(self, request: Request) -> None:
        """Add a new request.

        Raises InputError for a request that was served before, and for ids that are taken or continue no submitted
        request.
        """
        if request.request_id in self.requests:
            raise InputError("request_id", request.request_id, "an id of no other request")
        if request.continues is not None and request.continues not in self.requests:
            raise InputError("continues", request.continues, "the id of an earlier request")
        require(request.prompt_ids, "prompt_ids", request.prompt_ids, "at least one token")
        if request.finish_reason or request.arrived or request.token_ids:
            raise InputError("request", f"request {request.request_id}, already served", "a request not yet served")
        self._order[request.request_id] = len(self._order)
        self.requests[request.request_id] = request
        self.coming.append(request)
        self.has_aborts |= request.abort_at is not None
        self._has_turns |= request.continues is not None

    def forget(self, request_id: int) -> None:
        """Drop a request that has ended."""
        self.requests.pop(request_id, None)
        self._order.pop(request_id, None)

    def wait(self, request: Request) -> None:
        """Put a request among the waiting ones."""
        insort(self.waiting, request, key=self.precedence)

    def previous(self, request: Request) -> Request | None:
        """Find the request whose conversation this one continues, None if there is none."""
        return None if request.continues is None else self.requests.get(request.continues)

    def rejection_reason(self, request: Request) -> str | None:
        """Explain why the conversation that a request continues cannot go on, None if it can."""
        previous = self.previous(request)
        if previous is None or (previous.arrived is not None and previous.finish_reason != "rejected"):
            return None
        end = "was rejected" if previous.finish_reason == "rejected" else "was aborted before it began"
        return f"request {previous.request_id}, which it continues, {end}"

    def will_change(self, step: int) -> bool:
        """Check whether a request is still to arrive after a step, or a waiting one to be aborted."""
        arrives = any(request.arrival > step for request in self.coming)
        return arrives or any(request.abort_at is not None for request in self.waiting)

    def next_event(self) -> int:
        """Find the step of the next arrival or abort among the requests that have not arrived."""
        arrivals = [request.arrival for request in self.coming if self._can_come(request)]
        aborts = [request.abort_at for request in self.coming if request.abort_at is not None]
        return min(arrivals + aborts)

    def arrivals(self, step: int) -> Iterator[Request]:
        """Remove and return the requests due at a step.

        A turn of a conversation is due once the turn before has ended.
        """
        for request in [request for request in self.coming if request.arrival <= step]:
            if self._can_come(request):
                self.coming.remove(request)
                yield request

    def _can_come(self, request: Request) -> bool:
        previous = self.previous(request)
        return previous is None or previous.finish_reason is not None

    def precedence(self, request: Request) -> tuple[int, int, int]:
        """Compute the sort key of the order of service: priority, arrival, submission."""
        step = request.arrival if request.arrived is None else request.arrived.step
        return -request.priority, step, self._order[request.request_id]

    def is_continued(self, request: Request) -> bool:
        """Check whether a turn may still come that would use a request's KV."""
        if request.keep or not self._has_turns:
            return request.keep
        return any(turn.continues == request.request_id for turn in [*self.coming, *self.waiting])

    def remove(self, request: Request) -> None:
        """Remove a request, if it is here, where none has a row."""
        if request.row >= 0:
            return
        for requests in (self.coming, self.waiting):
            if request in requests:
                requests.remove(request)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prefill of one step."""

    requests: tuple[Request, ...]
    chunks: tuple[tuple[int, int], ...]  # (start, end) of each request: columns start to end - 1


NO_PREFILL = PrefillPlan((), ())


class Admission:
    """Requests in prefill or in the running batch, and their way there from the queue."""

    def __init__(
        self, serving: ServingConfig, page_size: int, queue: Queue, reservations: Reservations, runner: "Runner"
    ) -> None:
        self.prefilling: list[Request] = []  # admitted, with an incomplete prefill, in order of admission
        self._serving = serving
        self._page_size = page_size
        self._queue = queue
        self._reservations = reservations
        self._runner = runner

    @property
    def admitted_requests(self) -> list[Request]:
        """List the requests in prefill and in the running batch."""
        return [*self._runner.requests, *self.prefilling]

    def make_room(self) -> list[Preemption]:
        """Preempt requests until the next round of the others fits."""
        preempted = []
        while not self._reservations.make_room(self.admitted_requests):
            preempted.append(self._preempt(self._victim()))
        return preempted

    def _victim(self) -> Request:
        """Choose the victim of the lowest priority: the latest arrival, or the fewest or most columns."""
        sign = {"latest": 0, "shortest": -1, "longest": 1}[self._serving.preemption]

        def key(request: Request) -> tuple[int, int, list[int]]:
            priority, *arrival = self._queue.precedence(request)
            return priority, sign * self._reservations.committed(request), arrival

        return max(self.admitted_requests, key=key)

    def _preempt(self, request: Request) -> Preemption:
        """Free a request's slots and make it wait, after which it computes its KV again."""
        seq_len = self._reservations.committed(request)
        in_page = seq_len % self._page_size != 0
        preemption = Preemption(request.request_id, seq_len, in_page, is_prefilling=request in self.prefilling)
        request.num_preemptions += 1
        self.remove(request)
        self._reservations.keep_side_outputs(request)
        self._reservations.release(request)
        self._queue.wait(request)
        return preemption

    def remove(self, request: Request) -> None:
        """Remove a request from the queue, prefill or batch, and leave its KV."""
        self._queue.remove(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self._runner.drop([request])

    def admit(self) -> Iterator[Request]:
        """Admit waiting requests in order, up to the first that does not fit."""
        while self._queue.waiting:
            request = self._queue.waiting[0]
            admitted_requests = self.admitted_requests
            is_full = len(admitted_requests) >= self._serving.max_running
            if is_full or not self._reservations.admit(request, admitted_requests):
                break
            self._queue.waiting.pop(0)
            self.prefilling.append(request)
            yield request

    def plan(self) -> PrefillPlan:
        """Divide the prompt tokens of a step among requests in order of admission."""
        if not self.prefilling:
            return NO_PREFILL
        budget = self._serving.chunk_tokens
        requests: list[Request] = []
        chunks: list[tuple[int, int]] = []
        for request in self.prefilling:
            start = self._reservations.committed(request)
            end = request.prefill_len if budget is None else min(request.prefill_len, start + budget)
            if end > start:
                budget = None if budget is None else budget - (end - start)
                requests.append(request)
                chunks.append((start, end))
        return PrefillPlan(tuple(requests), tuple(chunks))
