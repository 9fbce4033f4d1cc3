"""The serving loop, in which requests arrive and end while every step runs one round of the running batch.

A step is planned (arrivals, aborts, room for the next round, admission, prompt chunks), launched (at most one prefill
call and one round), and read. Under `sync` a step's results are read in the same step. Under `overlap` they are read in
the next, so no plan depends on a round that still runs.
"""

import time
from collections import deque
from collections.abc import Callable

from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.drafter import columns_ahead
from specsim.core.engine import Engine
from specsim.core.errors import InputError, require, require_type
from specsim.core.policies.per_request import AnyPolicy
from specsim.core.pool import KVPool
from specsim.serving.adaptation import adaptation_of, settings_of
from specsim.serving.admission import Admission, PrefillPlan, Queue
from specsim.serving.requests import Arrival, Emission, Request
from specsim.serving.reservations import Reservations
from specsim.serving.runner import FIRST_SETTING, Delivery, Launched, Runner
from specsim.serving.trace import Chunk, DeliveredRound, FinishEvent, Reuse, StepLog, StepRecord, Trace


def check_serving(serving: ServingConfig, config: SpecConfig) -> None:
    """Raise InputError for scheduler settings under which this config can run no request."""
    if serving.schedule == "overlap" and config.release == "round":
        raise InputError("schedule", serving.schedule, "sync with release 'round', as the host frees pages in a round")
    if serving.num_slots < config.page_size:
        raise InputError("num_slots", serving.num_slots, f"at least a page, {config.page_size}")


class Scheduler:
    """Continuous batching over an engine of either implementation.

    Requests are added with `submit` and advanced with `step`, or with `run` until all have ended; `close` then frees
    all slots. policy: chooses the setting of every round, for an engine with several. pools: those of a closed
    scheduler over the same engine and setting of serving, whose captured graphs then serve this one too. clock:
    seconds, for the requests' times. audits: whether the pool is audited after every step.
    """

    def __init__(
        self,
        engine: Engine,
        serving: ServingConfig | None = None,
        *,
        policy: AnyPolicy | None = None,
        pools: KVPool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        audits: bool = False,
    ) -> None:
        require(hasattr(engine, "make_pools"), "engine", engine, "an engine, such as specsim.load_engine returns")
        self.serving = serving = ServingConfig() if serving is None else serving
        require_type("serving", serving, ServingConfig, "a ServingConfig")
        config = engine.config
        check_serving(serving, config)
        self.max_len = config.length_limit
        self.pools = engine.make_pools(2 * serving.max_running, serving.num_slots) if pools is None else pools
        self.drafter = engine.drafter
        settings, ahead, lookahead = settings_of(engine), columns_ahead(self.drafter), self.drafter.lookahead
        self.reservations = Reservations(self.pools, settings, serving.prefix_cache, ahead, lookahead)
        self.runner = Runner(engine, self.pools, lagging=serving.schedule == "overlap")
        self.trace = Trace(acceptance=str(engine.acceptance or engine.rule or "target"))
        self.audited_slots = 0  # over all audits
        self.is_stalled = False
        self._queue = Queue()
        self._admission = Admission(serving, config.page_size, self._queue, self.reservations, self.runner)
        self._adaptation = adaptation_of(engine, policy)
        self._unread: deque[Launched] = deque()
        self._clock = clock
        self._start = clock()
        self._audits = audits
        self._log = StepLog(0)

    @property
    def requests(self) -> dict[int, Request]:
        """All submitted requests, by id."""
        return self._queue.requests

    def submit(self, request: Request) -> None:
        """Add a request for its arrival step, which may continue a conversation that still runs."""
        self._queue.submit(request)

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of the settings of all rounds, in order, where a policy chooses them."""
        return tuple(self._adaptation.choices) if self._adaptation else ()

    @property
    def step_index(self) -> int:
        """Index of the current step, or between steps of the next."""
        return self._log.step

    @property
    def is_busy(self) -> bool:
        """Check whether a request has not ended or a result has not been read."""
        return bool(self._queue.coming or self._queue.waiting or self._admission.admitted_requests or self._unread)

    def run(self, after_step: Callable[[], object] = lambda: None) -> None:
        """Step until all requests have ended, skipping steps in which nothing happens."""
        while self.is_busy:
            if (event := self.next_event) is not None:
                self.skip_to(event)
            self.step()
            after_step()
            self.check_not_stalled()

    def check_not_stalled(self) -> None:
        """Raise InputError if nothing can happen any more, as the slot limit is below what the next request needs."""
        if self.is_stalled:
            request = self._queue.by_precedence()[0]
            needed = self.reservations.least_slots(request)
            raise InputError(
                "limit", self.pools.usable_slots, f"at least {needed} slots, for request {request.request_id}"
            )

    @property
    def next_event(self) -> int | None:
        """Step of the next arrival or abort, None if there is none or other work comes first."""
        if not self._queue.coming or self._queue.waiting or self._admission.admitted_requests or self._unread:
            return None
        return max(self.step_index, self._queue.next_event())

    def skip_to(self, step: int) -> None:
        """Jump to a later step, as nothing happens before it."""
        self._log.step = step

    def step(self) -> StepRecord:
        """Plan, launch and read once."""
        plan = self.plan()
        if plan.requests:
            self.prefill(plan)
        if self.runner.requests:
            self.decode()
        return self.end_step()

    def plan(self) -> PrefillPlan:
        """Plan this step's prefill, and make room for its round, from what the host knows."""
        self._arrive()
        for request in [*self._queue.coming, *self._queue.waiting, *self._admission.admitted_requests]:
            if request.abort_at is not None and request.abort_at <= self.step_index:
                self.abort(request.request_id)
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
        self._log.events["decoded"] += [request.request_id for request in self.runner.requests]
        choice = FIRST_SETTING
        if self._adaptation:
            choice = self._adaptation.choose(self.step_index, self.runner.requests, self._seconds())
            self._log.setting = choice.setting
        self._enqueue(self.runner.round(self.step_index, choice))

    def end_step(self) -> StepRecord:
        """Read the results that are due, and record the step."""
        while self._unread and self._unread[0].step < self.step_index:
            self._read(self._unread.popleft())
        usage = self.pools.audit() if self._audits else self.reservations.usage()
        self.audited_slots += usage["slots"] if self._audits else 0
        record = self._log.record(self._seconds(), self.reservations.evicted_pages, usage)
        self.reservations.evicted_pages = 0
        awaits = self._queue.waiting and not self._queue.will_change(self.step_index)
        self.is_stalled = bool(awaits) and not any(self._log.events.values())
        self.trace.append(record)
        self._log = StepLog(self.step_index + 1)
        return record

    def abort(self, request_id: int) -> bool:
        """End a request now and drop its unread results, or return False if it has ended."""
        request = self.requests.get(request_id)
        if request is None or request.finish_reason:
            return False
        self._log.events["aborted"].append(request_id)
        self._finish(request, "abort")
        return True

    def limit(self, num_slots: int) -> None:
        """Limit the slots from the next step on, preempting requests if more are in use."""
        self.pools.limit(num_slots)

    def close(self) -> dict[str, int]:
        """Abort unfinished requests, free all slots, audit the pool, and return KVPool.usage."""
        for request_id in self.requests:
            self.abort(request_id)
        self._unread.clear()
        self.reservations.close()
        if any(self._log.events.values()):
            self.end_step()
        usage = self.pools.audit()
        if usage["free"] != usage["slots"] or usage["requests"]:
            raise AssertionError(f"slots or rows are still held after the last request: {usage}")
        return usage

    def _arrive(self) -> None:
        for request in self._queue.arrivals(self.step_index):
            self._log.events["arrived"].append(request.request_id)
            request.arrived = Arrival(self.step_index, self._seconds())
            request.error = self._prepare(request)
            if request.error:
                self._log.events["rejected"].append(request.request_id)
                self._finish(request, "rejected")
            else:
                self._queue.waiting.append(request)

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

    def _enqueue(self, launched: Launched) -> None:
        if self.serving.schedule == "overlap":
            self._unread.append(launched)
        else:
            self._read(launched)

    def _read(self, launched: Launched) -> None:
        deliveries = launched.read()
        if self._adaptation:
            self._adaptation.observe(launched, deliveries, self._seconds())
        for delivery in deliveries:
            self._append_tokens(delivery, launched)

    def _append_tokens(self, delivery: Delivery, launched: Launched) -> None:
        """Append new tokens to a request, except to one that has ended meanwhile."""
        request = delivery.request
        has_ended = request.finish_reason is not None
        num_kept = request.take(delivery.token_ids, delivery.logprobs)
        self.runner.check(request, num_kept)
        if delivery.is_round:
            count = len(delivery.token_ids)
            self._log.events["results"].append(DeliveredRound(request.request_id, launched.step, count, num_kept))
        if has_ended:
            return
        if delivery.is_round:
            request.accepted.append(len(delivery.token_ids))
            request.proposed.append(delivery.proposed_depth)
            request.settings.append(launched.choice.setting)
            if delivery.draft_steps is not None:
                request.draft_steps.append(delivery.draft_steps)
        request.emissions.append(Emission(self.step_index, self._seconds(), num_kept))
        if request.row >= 0:
            self.reservations.mark_committed(request, request.prefill_len)
        if request.finish_reason:
            self._finish(request, request.finish_reason)

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

    def _seconds(self) -> float:
        return self._clock() - self._start
