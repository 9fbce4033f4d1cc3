"""Admission of requests to prefill and the running batch, and preemption where they lack slots."""

from collections.abc import Iterator
from dataclasses import dataclass

from specsim.core.config import ServingConfig
from specsim.serving.queue import Queue
from specsim.serving.requests import Request
from specsim.serving.residents import Residents
from specsim.serving.runner import Runner
from specsim.serving.trace import Preemption


@dataclass(frozen=True, slots=True)
class Plan:
    """The prefill of one step."""

    requests: tuple[Request, ...]
    chunks: tuple[tuple[int, int], ...]  # (start, end) of each request: columns start to end - 1


class Admission:
    """Requests in prefill or in the running batch, and the way there from the queue."""

    def __init__(
        self, serving: ServingConfig, page_size: int, queue: Queue, residents: Residents, runner: Runner
    ) -> None:
        self.prefilling: list[Request] = []  # admitted, with an incomplete prefill, in order of admission
        self._serving = serving
        self._page_size = page_size
        self._queue = queue
        self._residents = residents
        self._runner = runner

    @property
    def placed(self) -> list[Request]:
        """List the requests in prefill and in the running batch."""
        return [*self._runner.requests, *self.prefilling]

    def make_room(self) -> list[Preemption]:
        """Preempt requests until the next round of the others fits."""
        preempted = []
        while not self._residents.make_room(self.placed):
            preempted.append(self._preempt(self._victim()))
        return preempted

    def _victim(self) -> Request:
        """Choose the victim of the lowest priority: the latest arrival, or the fewest or most columns."""
        sign = {"latest": 0, "shortest": -1, "longest": 1}[self._serving.preemption]

        def key(request: Request) -> tuple[int, int, list[int]]:
            priority, *arrival = self._queue.precedence(request)
            return priority, sign * self._residents.committed(request), arrival

        return max(self.placed, key=key)

    def _preempt(self, request: Request) -> Preemption:
        """Free a request's slots and make it wait, after which it computes its KV again."""
        seq_len = self._residents.committed(request)
        in_page = seq_len % self._page_size != 0
        preemption = Preemption(request.request_id, seq_len, in_page, is_prefilling=request in self.prefilling)
        request.num_preemptions += 1
        self.remove(request)
        self._residents.keep_side_outputs(request)
        self._residents.release(request)
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
            if len(self.placed) >= self._serving.max_running or not self._residents.admit(request, self.placed):
                break
            self._queue.waiting.remove(request)
            self.prefilling.append(request)
            yield request

    def plan(self) -> Plan:
        """Divide the prompt tokens of a step among requests in order of admission."""
        left = self._serving.chunk_tokens
        requests: list[Request] = []
        chunks: list[tuple[int, int]] = []
        for request in self.prefilling:
            start = self._residents.committed(request)
            end = request.prefill_len if left is None else min(request.prefill_len, start + left)
            if end > start:
                left = None if left is None else left - (end - start)
                requests.append(request)
                chunks.append((start, end))
        return Plan(tuple(requests), tuple(chunks))
