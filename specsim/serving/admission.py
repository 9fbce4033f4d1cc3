"""Queue of a scheduler's requests, admission to prefill and the running batch, and preemption."""

from collections.abc import Iterator
from dataclasses import dataclass

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.serving.requests import Request
from specsim.serving.reservations import Reservations
from specsim.serving.runner import Runner
from specsim.serving.trace import Preemption


class Queue:
    """Submitted requests by id, and the conversations that they form."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # all submitted requests
        self.coming: list[Request] = []  # still to arrive
        self.waiting: list[Request] = []  # arrived or preempted, without a row
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

    def by_precedence(self) -> list[Request]:
        """List the waiting requests in the order of service."""
        return sorted(self.waiting, key=self.precedence)

    def is_continued(self, request: Request) -> bool:
        """Check whether a turn may still come that would use a request's KV."""
        turns = [*self.coming, *self.waiting]
        return request.keep or any(turn.continues == request.request_id for turn in turns)

    def remove(self, request: Request) -> None:
        """Remove a request, if it is here."""
        for requests in (self.coming, self.waiting):
            if request in requests:
                requests.remove(request)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prefill of one step."""

    requests: tuple[Request, ...]
    chunks: tuple[tuple[int, int], ...]  # (start, end) of each request: columns start to end - 1


class Admission:
    """Requests in prefill or in the running batch, and their way there from the queue."""

    def __init__(
        self, serving: ServingConfig, page_size: int, queue: Queue, reservations: Reservations, runner: Runner
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
        self._queue.waiting.append(request)
        return preemption

    def remove(self, request: Request) -> None:
        """Remove a request from the queue, prefill or batch, and leave its KV."""
        self._queue.remove(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self._runner.drop([request])

    def admit(self) -> Iterator[Request]:
        """Admit waiting requests in order, up to the first that does not fit."""
        for request in self._queue.by_precedence():
            if len(self.admitted_requests) >= self._serving.max_running or not self._reservations.admit(
                request, self.admitted_requests
            ):
                break
            self._queue.waiting.remove(request)
            self.prefilling.append(request)
            yield request

    def plan(self) -> PrefillPlan:
        """Divide the prompt tokens of a step among requests in order of admission."""
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
