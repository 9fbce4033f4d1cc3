"""Requests of a scheduler without KV: those still to arrive, and those that wait for admission."""

from collections.abc import Iterator

from specsim.core.errors import InputError, require
from specsim.serving.requests import Request


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

    def why_never(self, request: Request) -> str | None:
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
        for request in [each for each in self.coming if each.arrival <= step]:
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
