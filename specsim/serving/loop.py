"""The serving loop, in which requests arrive and end while every step runs one round of the running batch.

A step is planned (arrivals, aborts, room for the next round, admission, prompt chunks), launched (at most one prefill
call and one round), and read. Under `sync` a step's results are read in the same step. Under `overlap` they are read in
the next, so no plan depends on a round that still runs.

The loop serves an engine (serving.scheduler) and a simulated one (simulator.server), which needs no torch.
"""

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from specsim.core.config import ServingConfig
from specsim.core.page_pool import PagePool
from specsim.core.policies.policy import FIRST_SETTING
from specsim.serving.admission import Admission, PrefillPlan, Queue
from specsim.serving.requests import Arrival, Request
from specsim.serving.reservations import Reservations
from specsim.serving.trace import EVENTS, SLOTS, Chunk, FinishEvent, Reuse, StepRecord

if TYPE_CHECKING:
    from specsim.serving.adaptation import Adaptation
    from specsim.serving.runner import Launched, Runner


class StepLog:
    """A record under construction, with events by name, in the order in which they happen."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.setting = 0
        self.events: defaultdict[str, list[Any]] = defaultdict(list)

    def record(self, seconds: float, evicted_pages: int, usage: dict[str, int]) -> StepRecord:
        """Make the record, with the slots of KVPool.usage at the end of the step."""
        slots = {name: usage[name.removesuffix("_slots")] for name in SLOTS}
        events: dict[str, Any] = {name: tuple(self.events[name]) for name in EVENTS}
        return StepRecord(
            step=self.step, seconds=seconds, evicted_pages=evicted_pages, setting=self.setting, **slots, **events
        )


class ServingLoop:
    """Continuous batching over any runner.

    Subclasses say what a step is, what its results do to requests, and which time it is.
    """

    max_len: int  # most tokens of a request, prompt included
    adaptation: "Adaptation | None" = None  # chooses the setting of every round, None for a single one

    def __init__(self, serving: ServingConfig, pools: PagePool, reservations: Reservations, runner: "Runner") -> None:
        self.serving = serving
        self.reservations = reservations
        self.runner = runner
        self._queue = Queue()
        self._admission = Admission(serving, pools.page_size, self._queue, reservations, runner)
        self._unread: deque[Launched] = deque()
        self._log = StepLog(0)

    @property
    def requests(self) -> dict[int, Request]:
        """All submitted requests, by id."""
        return self._queue.requests

    def submit(self, request: Request) -> None:
        """Add a request for its arrival step, which may continue a conversation that still runs."""
        self._queue.submit(request)

    def forget(self, request_id: int) -> None:
        """Drop a request that has ended, so that a server's memory does not grow; nothing can continue it then."""
        self._queue.forget(request_id)

    @property
    def step_index(self) -> int:
        """Index of the current step, or between steps of the next."""
        return self._log.step

    @property
    def is_busy(self) -> bool:
        """Check whether a request has not ended or a result has not been read."""
        return bool(self._queue.coming or self._has_work)

    @property
    def _has_work(self) -> bool:
        """Check whether a request has arrived and not ended, or a result has not been read."""
        queue, admission = self._queue, self._admission
        return bool(self.runner.requests or queue.waiting or admission.prefilling or self._unread)

    def plan(self) -> PrefillPlan:
        """Plan this step's prefill, and make room for its round, from what the host knows."""
        self._arrive()
        if self._queue.has_aborts:
            self._abort_due()
        self._log.events["preempted"] += self._admission.make_room()
        if not self._log.events["preempted"]:  # their last results may be unread, and there is no room anyway
            for request in self._admission.admit():
                self._note_admitted(request)
        self.reservations.reserve(self.runner.requests)
        return self._admission.plan()

    def prefill(self, plan: PrefillPlan) -> None:
        """Launch a plan's chunks, even of an empty plan, in a rank without work while others have some."""
        launched = self.runner.prefill(self.step_index, plan.requests, plan.chunks)
        for request, (start, end) in zip(plan.requests, plan.chunks, strict=True):
            self._log.events["prefilled"].append(Chunk(request.request_id, start, end))
            self.reservations.mark_committed(request, end)
            if end == request.prefill_len:
                self._admission.prefilling.remove(request)
        self._enqueue(launched)

    def decode(self) -> None:
        """Launch a round of the running batch, even of an empty one."""
        self._note_round()
        choice = FIRST_SETTING
        if self.adaptation:
            choice = self.adaptation.choose(self.step_index, self.runner.requests, self._seconds())
            self._log.setting = choice.setting
        self._enqueue(self.runner.round(self.step_index, choice))

    def read_due(self) -> None:
        """Read the results of earlier steps."""
        while self._unread and self._unread[0].step < self.step_index:
            self._read(self._unread.popleft())

    def abort(self, request_id: int) -> bool:
        """End a request now and drop its unread results, or return False if it has ended."""
        request = self.requests.get(request_id)
        if request is None or request.finish_reason:
            return False
        self._log.events["aborted"].append(request_id)
        self._finish(request, "abort")
        return True

    def _arrive(self) -> None:
        if not self._queue.coming:
            return
        for request in self._queue.arrivals(self.step_index):
            self._log.events["arrived"].append(request.request_id)
            request.arrived = Arrival(self.step_index, self._seconds())
            request.error = self._prepare(request)
            if request.error:
                self._log.events["rejected"].append(request.request_id)
                self._finish(request, "rejected")
            else:
                self._queue.wait(request)

    def _abort_due(self) -> None:
        for request in [*self._queue.coming, *self._queue.waiting, *self._admission.admitted_requests]:
            if request.abort_at is not None and request.abort_at <= self.step_index:
                self.abort(request.request_id)

    def _prepare(self, request: Request) -> str | None:
        """Complete a request's prompt and length.

        Returns the reason why it can never run, None if it can.
        """
        if reason := self._queue.rejection_reason(request):
            return reason
        previous = self._queue.previous(request)
        if previous is not None:
            request.follow(previous)
        request.fit(self.max_len)
        return self.reservations.rejection_reason(request)

    def _note_admitted(self, request: Request) -> None:
        self._log.events["admitted"].append(request.request_id)
        if request.num_preemptions:
            self._log.events["resumed"].append(request.request_id)
        if reused := self.reservations.committed(request):
            self._log.events["reused"].append(Reuse(request.request_id, reused))
            request.num_reused += reused

    def _note_round(self) -> None:
        self._log.events["decoded"] += [request.request_id for request in self.runner.requests]

    def _enqueue(self, launched: "Launched") -> None:
        if self.serving.schedule == "overlap":
            self._unread.append(launched)
        else:
            self._read(launched)

    def _finish(self, request: Request, reason: str) -> None:
        """End a request in any state."""
        request.finish_reason = reason
        is_complete = reason in ("stop", "length")
        request.side_outputs = self.runner.side_outputs(request) if is_complete else {}
        self._log.events["finished"].append(FinishEvent(request.request_id, reason))
        self._admission.remove(request)
        self.runner.finish(request)
        previous = self._queue.previous(request)
        if previous is not None and not self._queue.is_continued(previous):
            self.reservations.end_session(previous.request_id)
        if request.row >= 0:
            self.reservations.release(request, keep_session=reason != "abort" and self._queue.is_continued(request))

    def _read(self, launched: "Launched") -> None:
        """Wait for the results of a prefill or a round, and give them to their requests."""
        raise NotImplementedError

    def _seconds(self) -> float:
        """Give the seconds since the start."""
        raise NotImplementedError
