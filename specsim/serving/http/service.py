"""The engine thread, which owns the scheduler, and the requests that other threads give it."""

import asyncio
import math
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache, partial
from threading import Thread
from typing import Any, Self, TypeVar

import torch

from specsim.core.config import ServingConfig
from specsim.core.engine import Engine
from specsim.core.errors import InputError, require_int
from specsim.core.pair import Pair
from specsim.serving.adaptation import settings_of
from specsim.serving.guidance import Guidance
from specsim.serving.http.job import Ask, Job, Progress
from specsim.serving.http.limits import ServerLimits, Unavailable
from specsim.serving.http.metrics import Metrics
from specsim.serving.http.min_tokens import MinTokens
from specsim.serving.http.server_engine import LiveGrammars, RequestedSteps
from specsim.serving.http.sessions import Session, SessionTurn
from specsim.serving.http.ticket import Ticket
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler
from specsim.serving.scoring import NO_SCORES, Scorer

_STREAM_BITS = 32  # of a request id: they name its random numbers, and the higher ones the request
_UNSEEDED = 2**31  # first random stream of requests without a seed
T = TypeVar("T")


class Service:
    """A scheduler that runs in a thread of its own until the service is closed.

    engine: such as load_server_engine makes, or one that wraps it. The service is a context manager.
    """

    def __init__(
        self, pair: Pair, engine: Engine, serving: ServingConfig | None = None, limits: ServerLimits | None = None
    ) -> None:
        self.pair = pair
        self.tokenizer: Any = pair.tokenizer  # the target's, None where it has none
        if self.tokenizer is not None:
            self.tokenizer.decode([])  # loads it now, as a request would while all others wait
        self.engine = engine
        self.serving = ServingConfig() if serving is None else serving
        self.limits = ServerLimits() if limits is None else limits
        self.settings = settings_of(engine)
        self.config = max(self.settings, key=lambda config: config.num_steps)
        self.model = pair.name.partition(",")[0]  # name under which clients know it
        self.metrics = Metrics(self.model, self.config)
        self.policy = RequestedSteps(self.settings)
        target = pair.target.config
        guidance = partial(
            Guidance, tokenizer=pair.tokenizer, vocab_size=target.vocab_size, end_ids=target.eos_token_ids
        )
        self.grammar = lru_cache(64)(guidance)  # of a form and a text
        self._scheduler = self._make_scheduler()
        self._jobs: dict[int, Job] = {}
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._serial = 0
        self._is_open = True
        self._is_paused = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.put(self._end)
        self._thread.join()

    def submit(self, asks: Sequence[Ask]) -> Ticket:
        """Give requests to the engine thread, from a running event loop.

        Raises InputError for one that cannot run, and Unavailable where the queue is full.
        """
        if not self._is_open:
            raise Unavailable(503, "the server ends")
        if len(self._jobs) + len(asks) > self.limits.queue + self.serving.max_running:
            raise Unavailable(429, f"the queue of {self.limits.queue} requests is full; try again later")
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Any] = asyncio.Queue()

        def deliver(index: int, progress: Progress | Exception) -> None:
            with suppress(RuntimeError):  # of a loop that has ended
                loop.call_soon_threadsafe(updates.put_nowait, (index, progress))

        jobs = [self._job(ask, partial(deliver, index)) for index, ask in enumerate(asks)]
        for job in jobs:
            self._jobs[job.request.request_id] = job
            if job.ask.turn is not None:
                job.ask.turn.session.running = job.request.request_id
            self._commands.put(partial(self._start, job))
            self._limit_time(loop, job)
        return Ticket([job.request.request_id for job in jobs], updates, self.abort)

    def _limit_time(self, loop: asyncio.AbstractEventLoop, job: Job) -> None:
        """End a request that waits or runs for too long, by timers, so that steps need not look for it."""
        limits = self.limits
        for seconds, verb, only_waiting in (
            (limits.queue_seconds, "waited", True),
            (limits.request_seconds, "ran", False),
        ):
            if math.isfinite(seconds):
                error = Unavailable(503, f"the request {verb} longer than {seconds:g} s")
                loop.call_later(seconds, self._commands.put, partial(self._drop_late, job, error, only_waiting))

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests, or all of them, with finish_reason abort."""
        self._commands.put(partial(self._abort, request_ids))

    async def run(self, work: Callable[[Scheduler], T]) -> T:
        """Run a function of the scheduler in the engine thread, between two steps."""
        done: Future[T] = Future()

        def command() -> None:
            try:
                done.set_result(work(self._scheduler))
            except Exception as error:
                done.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(done)

    def pause(self, is_paused: bool) -> None:
        """Hold all requests where they are, or let them go on."""
        self._commands.put(partial(setattr, self, "_is_paused", is_paused))

    @property
    def is_running(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._jobs)

    def _job(self, ask: Ask, deliver: Callable[[Progress | Exception], None]) -> Job:
        request = self._request(ask)
        grammar = ask.grammar
        if ask.min_tokens:
            grammar = MinTokens(ask.min_tokens, request.stop_ids, self.pair.target.config.vocab_size, grammar)
        if grammar is not None and not isinstance(self.engine.grammars, LiveGrammars):
            raise InputError("grammar", "given", "none on this server, whose engine takes none")
        if ask.num_steps is not None:
            require_int("num_steps", ask.num_steps, 0, self.policy.most)
        scorer = None if ask.scores == NO_SCORES else Scorer(self.engine, request, ask.scores, grammar)
        return Job(ask, request, deliver, grammar, scorer)

    def _request(self, ask: Ask) -> Request:
        self._serial += 1
        stream = _UNSEEDED + self._serial % _UNSEEDED if ask.seeded_stream is None else ask.seeded_stream
        schedule: Any = {"keep": ask.turn is not None, "continues": 0 if ask.turn and ask.turn.context else None}
        request = make_request(self.pair.target.config, self.tokenizer, stream, ask.prompt, ask.params, **schedule)
        request.request_id |= self._serial << _STREAM_BITS
        request.continues = None  # until it starts
        return request

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(self.engine, self.serving, policy=self.policy if hasattr(self.engine, "settings") else None)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._is_open:
                try:
                    self._work()
                except Exception as error:
                    self._fail(error)

    def _work(self) -> None:
        """Obey what other threads ask for, and run a step; wait where there is nothing to do."""
        is_idle = self._is_paused or not self._scheduler.is_busy
        while is_idle or not self._commands.empty():
            self._commands.get()()
            is_idle = False
        if self._is_open and self._scheduler.is_busy and not self._is_paused:
            self._step()

    def _step(self) -> None:
        record = self._scheduler.step()
        self._scheduler.trace.records.clear()
        if self._scheduler.adaptation is not None:
            self._scheduler.adaptation.choices.clear()
        self.metrics.count_step(record)
        self._publish()

    def _publish(self) -> None:
        """Deliver the progress of the requests that have some."""
        for job in list(self._jobs.values()):
            if job.request.finish_reason is not None:
                self._finish(job)
            elif job.ask.streams and len(job.request.token_ids) > job.num_delivered:
                job.deliver(job.progress(is_final=False))

    def _start(self, job: Job) -> None:
        ask, request = job.ask, job.request
        if request.request_id not in self._jobs:  # an engine's failure has ended it
            return
        if ask.turn is not None:
            self._continue_session(job, ask.turn)
        if ask.scores_only:
            request.finish_reason = "length"
            self._finish(job)
            return
        if ask.num_steps is not None:
            self.policy.requested[request.request_id] = ask.num_steps
        if job.grammar is not None and isinstance(self.engine.grammars, LiveGrammars):
            self.engine.grammars[request.request_id] = job.grammar
        self._scheduler.submit(request)

    def _continue_session(self, job: Job, turn: SessionTurn) -> None:
        """Let a request continue the one whose KV its session keeps, or begin with its context."""
        last = turn.session.last
        is_kept = last is not None and last.request_id in self._scheduler.requests and last.known_ids == turn.context
        if last is not None and is_kept and not job.ask.scores_only:
            job.request.continues = last.request_id
        else:
            job.request.prompt_ids = [*turn.context, *job.request.prompt_ids]

    def _finish(self, job: Job) -> None:
        self.metrics.count_request(job.request)
        progress = job.progress(is_final=True)
        self._forget(job)
        job.deliver(progress)

    def _forget(self, job: Job) -> None:
        request = job.request
        self._jobs.pop(request.request_id, None)
        self.policy.requested.pop(request.request_id, None)
        if isinstance(self.engine.grammars, LiveGrammars):
            self.engine.grammars.pop(request.request_id, None)
        turn = job.ask.turn
        self._free(request if turn is None else turn.session.end(request, job.ask.rid))

    def _free(self, request: Request | None) -> None:
        """Free what a request kept for a next turn."""
        if request is not None:
            self._scheduler.reservations.end_session(request.request_id)
            self._scheduler.forget(request.request_id)

    def _drop(self, job: Job, error: Exception) -> None:
        """End a request with an error."""
        self._scheduler.abort(job.request.request_id)
        self._forget(job)
        job.deliver(error)

    def close_session(self, session: Session) -> None:
        """End a session, with its turn that runs, and free its KV."""

        def command() -> None:
            session.is_closed = True
            if session.running is not None:
                self._abort([session.running])
            self._free(session.last)

        self._commands.put(command)

    def abort_named(self, rid: str) -> None:
        """End the requests of a name, and those of its choices."""

        def command() -> None:
            jobs = self._jobs.values()
            self._abort([job.request.request_id for job in jobs if f"{job.ask.rid}_".startswith(f"{rid}_")])

        self._commands.put(command)

    def _drop_late(self, job: Job, error: Unavailable, only_waiting: bool) -> None:
        """End a request whose time is over."""
        has_begun = job.request.row >= 0 or job.request.token_ids
        if job.request.request_id in self._jobs and not (only_waiting and has_begun):
            self._drop(job, error)

    def _abort(self, request_ids: Sequence[int] | None) -> None:
        for request_id in list(self._jobs) if request_ids is None else request_ids:
            self._scheduler.abort(request_id)
        self._publish()

    def _fail(self, error: Exception) -> None:
        """Tell all requests that a step has failed, and go on with an empty scheduler."""
        sentence = str(error) if isinstance(error, InputError) else f"the engine failed: {type(error).__name__}"
        jobs = list(self._jobs.values())
        self._scheduler = self._make_scheduler()
        for job in jobs:
            self._forget(job)
            job.deliver(Unavailable(500, sentence))

    def _end(self) -> None:
        self._abort(None)
        self._is_open = False
        self._scheduler.close()
