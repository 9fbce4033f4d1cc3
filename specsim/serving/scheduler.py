"""The serving loop: requests come and go, and every step advances those that have a place by one round.

A step is planned (arrivals, aborts, room for the next round, admission, chunks of prompts), launched (at most one
prefill call and one round), and read. Under `sync` what a step launched is read in it; under `overlap` in the step
after, so that nothing that is planned depends on a round that is still under way.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.serving.requests import Request
from specsim.serving.residents import Residents
from specsim.serving.runner import Delivery, Launched, Runner
from specsim.serving.trace import Chunk, Preemption, Result, StepLog, StepRecord, Trace


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step prefills: columns start to end - 1 of each request, chunks (start, end)."""

    requests: tuple[Request, ...]
    chunks: tuple[tuple[int, int], ...]


class Scheduler:
    """Continuous batching over an engine of either column.

    serving: see ServingConfig. clock: seconds, for the requests' times. audits: whether the pool is audited after
    every step (audited_slots counts them). requests: all that were submitted, by id; trace: a record a step; pools;
    residents: who holds KV; runner: the batch. Requests are submitted with `submit` and advanced with `step`, or with
    `run` until all have ended; `close` then gives everything back.
    """

    def __init__(
        self,
        engine,
        serving: ServingConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        audits: bool = False,
    ):
        self.serving = serving = serving or ServingConfig()
        config = engine.config
        if serving.schedule == "overlap" and config.release == "round":
            raise InputError("schedule", serving.schedule, "sync with release 'round', which frees what a round leaves")
        if serving.num_slots < config.page_size:
            raise InputError("num_slots", serving.num_slots, f"at least a page, {config.page_size}")
        self.max_len = config.max_len
        self.pools = engine.make_pools(2 * serving.max_running, serving.num_slots)
        self.residents = Residents(self.pools, config, serving.prefix_cache)
        self.runner = Runner(engine, self.pools, lagging=serving.schedule == "overlap")
        self.requests: dict[int, Request] = {}
        self._order: dict[int, int] = {}
        self.trace, self.audited_slots = Trace(acceptance=str(engine.acceptance or "target")), 0
        self._coming: list[Request] = []  # not yet arrived
        self._waiting: list[Request] = []  # without a place
        self._prefilling: list[Request] = []
        self._unread: deque[Launched] = deque()
        self._clock, self._start, self._audits = clock, clock(), audits
        self.is_stalled = False
        self._log = StepLog(0)

    def submit(self, request: Request) -> None:
        """Accept a request for its step of arrival; it may be one that continues a conversation that is under way."""
        if request.request_id in self.requests:
            raise InputError("request_id", request.request_id, "an id that no other request has")
        if request.continues is not None and request.continues not in self.requests:
            raise InputError("continues", request.continues, "the id of a request that was submitted before")
        if not request.prompt_ids:
            raise InputError("prompt_ids", request.prompt_ids, "at least one token")
        if request.finish_reason or request.arrived or request.token_ids:
            raise InputError("request", f"request {request.request_id}, served before", "one that has not been served")
        self._order[request.request_id] = len(self._order)
        self.requests[request.request_id] = request
        self._coming.append(request)

    @property
    def step_index(self) -> int:
        """The step that is under way, or between two steps the next."""
        return self._log.step

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended yet, or a result has not been read."""
        return bool(self._coming or self._waiting or self._prefilling or self.runner.requests or self._unread)

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Steps until every request has ended; those in which nothing happens are left out."""
        while self.is_busy:
            if (event := self.next_event) is not None:
                self.skip_to(event)
            self.step()
            after_step()
            self.check_not_stalled()

    def check_not_stalled(self) -> None:
        """Raises InputError if nothing can happen any more: whoever waits needs more slots than the limit allows."""
        if self.is_stalled:
            request = min(self._waiting, key=self._precedence)
            needed = self.residents.least_slots(request)
            raise InputError(
                "limit", self.pools.usable_slots, f"at least {needed} slots, for request {request.request_id}"
            )

    @property
    def next_event(self) -> int | None:
        """The step of the next arrival or abort while there is nothing to do before it; None while there is."""
        if not self._coming or self._waiting or self._placed or self._unread:
            return None
        arrivals = [request.arrival for request in self._coming if self._can_come(request)]
        aborts = [request.abort_at for request in self._coming if request.abort_at is not None]
        return max(self.step_index, min(arrivals + aborts))

    def _can_come(self, request: Request) -> bool:
        """Whether a request waits for no earlier turn of its conversation."""
        previous = self.requests.get(request.continues)
        return previous is None or previous.finish_reason is not None

    def skip_to(self, step: int) -> None:
        """Leave out steps in which nothing happens."""
        self._log.step = step

    def step(self) -> StepRecord:
        """Plan, launch and read once."""
        plan = self.plan()
        if plan.requests:
            self.prefill(plan)
        if self.runner.requests:
            self.decode()
        return self.end_step()

    def plan(self) -> Plan:
        """Decide what this step prefills, and make room for its round, from what the host knows."""
        self._arrive()
        for request in [*self._coming, *self._waiting, *self._placed]:
            if request.abort_at is not None and request.abort_at <= self.step_index:
                self.abort(request.request_id)
        while not self.residents.make_room(self._placed) and self._placed:
            self._preempt(self._victim())
        if not self._log.events["preempted"]:  # whose last results may be unread; and there is no room anyway
            self._admit()
        self.residents.reserve(self.runner.requests)
        return self._chunks()

    def prefill(self, plan: Plan) -> None:
        """Launch a plan's chunks; of no request where a rank has none and others have."""
        launched = self.runner.prefill(self.step_index, plan.requests, plan.chunks)
        for request, (start, end) in zip(plan.requests, plan.chunks, strict=True):
            self._log.events["prefilled"].append(Chunk(request.request_id, start, end))
            self.residents.settle(request, end)
            if end == request.prefill_len:
                self._prefilling.remove(request)
        self._launched(launched)

    def decode(self) -> None:
        """Launch a round of the running batch, also of an empty one."""
        self._log.events["decoded"] += [request.request_id for request in self.runner.requests]
        self._launched(self.runner.round(self.step_index))

    def end_step(self) -> StepRecord:
        """Read what is due, and record the step."""
        while self._unread and self._unread[0].step < self.step_index:
            self._read(self._unread.popleft())
        usage = self.pools.audit() if self._audits else self.pools.usage()
        self.audited_slots += usage["slots"] if self._audits else 0
        evicted, self.residents.evicted_pages = self.residents.evicted_pages, 0
        record = self._log.record(self._seconds(), evicted, usage)
        later = any(request.arrival > self.step_index for request in self._coming)
        later = later or any(request.abort_at is not None for request in self._waiting)
        self.is_stalled = bool(self._waiting) and not later and not any(self._log.events.values())
        self.trace.append(record)
        self._log = StepLog(self.step_index + 1)
        return record

    def abort(self, request_id: int) -> bool:
        """End a request now; what is under way for it is dropped. False if it has ended already."""
        request = self.requests.get(request_id)
        if request is None or request.finish_reason:
            return False
        self._log.events["aborted"].append(request_id)
        self._finish(request, "abort")
        return True

    def limit(self, num_slots: int) -> None:
        """Use at most that many slots from the next step on; requests give way if more are in use."""
        self.pools.limit(num_slots)

    def close(self) -> dict[str, int]:
        """Abort what has not ended, give everything back, and account for it: all slots are free."""
        for request_id in self.requests:
            self.abort(request_id)
        self._unread.clear()
        self.residents.close()
        if any(self._log.events.values()):
            self.end_step()
        usage = self.pools.audit()
        if usage["free"] != usage["slots"] or usage["requests"]:
            raise AssertionError(f"slots or rows are still held after the last request: {usage}")
        return usage

    @property
    def _placed(self) -> list[Request]:
        return [*self.runner.requests, *self._prefilling]

    def _precedence(self, request: Request) -> tuple:
        """The order in which requests are served."""
        return -request.priority, request.arrived[0], self._order[request.request_id]

    def _arrive(self) -> None:
        """Who is due comes in, the next turn of a conversation once the one before has ended."""
        for request in [each for each in self._coming if each.arrival <= self.step_index]:
            if not self._can_come(request):
                continue
            previous = self.requests.get(request.continues)
            self._coming.remove(request)
            self._log.events["arrived"].append(request.request_id)
            request.arrived = self.step_index, self._seconds()
            if previous is not None and (previous.arrived is None or previous.finish_reason == "rejected"):
                what = "was rejected" if previous.finish_reason == "rejected" else "was aborted before it began"
                request.error = f"request {previous.request_id}, which it continues, {what}"
            else:
                if previous is not None:
                    request.follow(previous)
                request.fit(self.max_len)
                request.error = self.residents.why_never(request)
            if request.error:
                self._log.events["rejected"].append(request.request_id)
                self._finish(request, "rejected")
            else:
                self._waiting.append(request)

    def _victim(self) -> Request:
        """Among the lowest priority the latest to arrive, or who has the fewest or the most columns committed."""
        sign = {"latest": 0, "shortest": -1, "longest": 1}[self.serving.preemption]

        def key(request: Request) -> tuple:
            priority, *arrival = self._precedence(request)
            return priority, sign * self.residents.committed(request), arrival

        return max(self._placed, key=key)

    def _preempt(self, request: Request) -> None:
        """Take a request's place away: it waits, and will compute the KV of its known tokens again."""
        seq_len, is_prefilling = self.residents.committed(request), request in self._prefilling
        in_page = seq_len % self.pools.page_size != 0
        self._log.events["preempted"].append(Preemption(request.request_id, seq_len, in_page, is_prefilling))
        request.num_preemptions += 1
        self._remove(request)
        self.residents.release(request)
        self._waiting.append(request)

    def _remove(self, request: Request) -> None:
        for place in (self._coming, self._waiting, self._prefilling):
            if request in place:
                place.remove(request)
        self.runner.drop([request])

    def _admit(self) -> None:
        """First come, first served within a priority; who does not fit holds up those behind."""
        for request in sorted(self._waiting, key=self._precedence):
            if len(self._placed) >= self.serving.max_running or not self.residents.admit(request, self._placed):
                break
            self._waiting.remove(request)
            self._prefilling.append(request)
            self._log.events["admitted"].append(request.request_id)
            if request.num_preemptions:
                self._log.events["resumed"].append(request.request_id)
            if reused := self.residents.committed(request):
                self._log.events["reused"].append((request.request_id, reused))
                request.num_reused += reused

    def _chunks(self) -> Plan:
        """Share the step's prompt tokens out, oldest place first."""
        left, requests, chunks = self.serving.chunk_tokens, [], []
        for request in self._prefilling:
            start = self.residents.committed(request)
            end = request.prefill_len if left is None else min(request.prefill_len, start + left)
            if end > start:
                left = None if left is None else left - (end - start)
                requests.append(request)
                chunks.append((start, end))
        return Plan(tuple(requests), tuple(chunks))

    def _launched(self, launched: Launched) -> None:
        if self.serving.schedule == "overlap":
            self._unread.append(launched)
        else:
            self._read(launched)

    def _read(self, launched: Launched) -> None:
        for delivery in launched.read():
            self._take(delivery, launched.step)

    def _take(self, delivery: Delivery, launched: int) -> None:
        """New tokens for a request; those of one that has ended meanwhile are dropped."""
        request, has_ended = delivery.request, delivery.request.finish_reason is not None
        kept = request.take(delivery.token_ids, delivery.logprobs)
        if delivery.is_round:
            count = len(delivery.token_ids)
            self._log.events["results"].append(Result(request.request_id, launched, count, kept))
        if has_ended:
            return
        if delivery.is_round:
            request.accepted.append(len(delivery.token_ids))
        request.emissions.append((self.step_index, self._seconds(), kept))
        if request.row >= 0:
            self.residents.settle(request, request.prefill_len)
        if request.finish_reason:
            self._finish(request, request.finish_reason)

    def _finish(self, request: Request, reason: str) -> None:
        """The end of a request, wherever it stands."""
        request.finish_reason = reason
        self._log.events["finished"].append((request.request_id, reason))
        self._remove(request)
        previous = self.requests.get(request.continues)
        if previous is not None and not self._is_continued(previous):
            self.residents.end_session(previous.request_id)
        if request.row >= 0:
            self.residents.release(request, keep_session=reason != "abort" and self._is_continued(request))

    def _is_continued(self, request: Request) -> bool:
        """Whether a turn may still come for which a request's KV is worth its slots."""
        turns = [*self._coming, *self._waiting]
        return request.keep or any(turn.continues == request.request_id for turn in turns)

    def _seconds(self) -> float:
        return self._clock() - self._start
