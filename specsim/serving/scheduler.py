"""Scheduler of the requests that an engine of either implementation serves."""

import time
from collections.abc import Callable

from specsim.core.arguments import check_arguments
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.drafter import columns_ahead
from specsim.core.engine import Engine
from specsim.core.errors import InputError, require, require_type
from specsim.core.policies.policy import AnyPolicy
from specsim.core.pool import KVPool
from specsim.serving.adaptation import adaptation_of, settings_of
from specsim.serving.loop import ServingLoop, StepLog
from specsim.serving.requests import Emission
from specsim.serving.reservations import Reservations
from specsim.serving.runner import Delivery, Launched, Runner
from specsim.serving.trace import DeliveredRound, StepRecord, Trace


def check_serving(serving: ServingConfig, config: SpecConfig) -> None:
    """Raise InputError for scheduler settings under which this config can run no request."""
    if serving.schedule == "overlap" and config.release == "round":
        raise InputError("schedule", serving.schedule, "sync with release 'round', as the host frees pages in a round")
    if serving.num_slots < config.page_size:
        raise InputError("num_slots", serving.num_slots, f"at least a page, {config.page_size}")


@check_arguments
class Scheduler(ServingLoop):
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
        serving = ServingConfig() if serving is None else serving
        require_type("serving", serving, ServingConfig, "a ServingConfig")
        config = engine.config
        check_serving(serving, config)
        self.max_len = config.length_limit
        self.pools = engine.make_pools(2 * serving.max_running, serving.num_slots) if pools is None else pools
        self.drafter = engine.drafter
        settings, ahead, lookahead = settings_of(engine), columns_ahead(self.drafter), self.drafter.lookahead
        reservations = Reservations(self.pools, settings, serving.prefix_cache, ahead, lookahead)
        runner = Runner(engine, self.pools, lagging=serving.schedule == "overlap")
        super().__init__(serving, self.pools, reservations, runner)
        self.trace = Trace(acceptance=str(engine.acceptance or engine.rule or "target"))
        self.audited_slots = 0  # over all audits
        self.is_stalled = False
        self.adaptation = adaptation_of(engine, policy)
        self._clock = clock
        self._start = clock()
        self._audits = audits

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of the settings of all rounds, in order, where a policy chooses them."""
        return tuple(self.adaptation.choices) if self.adaptation else ()

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
            request = self._queue.waiting[0]
            needed = self.reservations.least_slots(request)
            raise InputError(
                "limit", self.pools.usable_slots, f"at least {needed} slots, for request {request.request_id}"
            )

    @property
    def next_event(self) -> int | None:
        """Step of the next arrival or abort, None if there is none or other work comes first."""
        if not self._queue.coming or self._has_work:
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

    def end_step(self) -> StepRecord:
        """Read the results that are due, and record the step."""
        self.read_due()
        usage = self.pools.audit() if self._audits else self.reservations.usage()
        self.audited_slots += usage["slots"] if self._audits else 0
        record = self._log.record(self._seconds(), self.reservations.evicted_pages, usage)
        self.reservations.evicted_pages = 0
        awaits = self._queue.waiting and not self._queue.will_change(self.step_index)
        self.is_stalled = bool(awaits) and not any(self._log.events.values())
        self.trace.records.append(record)
        self._log = StepLog(self.step_index + 1)
        return record

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

    def _read(self, launched: Launched) -> None:
        deliveries = launched.read()
        if self.adaptation:
            self.adaptation.observe(launched, deliveries, self._seconds())
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

    def _seconds(self) -> float:
        return self._clock() - self._start
