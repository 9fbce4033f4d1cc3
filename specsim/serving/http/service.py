"""The engine thread, which owns the scheduler, and the requests that other threads give it."""

import asyncio
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Thread
from typing import Any, Self, TypeVar

import numpy as np
import torch

from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError, require_int
from specsim.core.grammar import Grammar
from specsim.core.pair import Pair
from specsim.core.policies.per_request import covering
from specsim.core.policies.policy import Choice
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.user_module import user_code
from specsim.serving.adaptation import settings_of
from specsim.serving.generation import load_adaptive_engine
from specsim.serving.guidance import Guidance
from specsim.serving.http.job import Ask, Job, Progress, Session
from specsim.serving.http.metrics import Metrics
from specsim.serving.http.min_tokens import MinTokens
from specsim.serving.http.scoring import Scorer
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

_STREAM_BITS = 32  # of a request id: they name its random numbers, and the higher ones the request
_UNSEEDED = 2**31  # first random stream of requests without a seed
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Most of what clients may ask of a server."""

    queue: int = 256  # requests that do not run yet; more get status 429
    body: int = 4 * 2**20  # bytes of a request
    choices: int = 128  # outputs of a request
    logprobs: int = 64  # alternatives of a token
    queue_seconds: float = math.inf  # that a request may wait; then it ends with status 503
    request_seconds: float = math.inf  # from a request's arrival to its end


class Unavailable(Exception):
    """A server that cannot take or finish a request now, in one sentence, with the status of the answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class LiveGrammars(dict[int, Grammar]):
    """Grammars of the running requests, which an engine reads in every round, also while there are none."""

    def __bool__(self) -> bool:
        return True


class RequestedSteps:
    """The policy by which every request has the draft steps that it asks for."""

    def __init__(self, settings: Sequence[SpecConfig]) -> None:
        self.most = max(config.num_steps for config in settings)
        self.requested: dict[int, int] = {}  # by request id; the others draft as many as they can
        self._settings = settings

    def choose_requests(self, requests: np.ndarray, contexts: np.ndarray) -> Choice:
        steps = [self.requested.get(int(request), self.most) for request in requests]
        return covering(self._settings, np.array(steps, dtype=np.int64))

    def observe_requests(self, requests: np.ndarray, choice: Choice, accepted: np.ndarray, seconds: float) -> None:
        pass


def load_server_engine(
    pair: Pair, config: SpecConfig, options: EngineOptions, acceptance: SyntheticAcceptance | None = None
) -> Engine:
    """Make the engine of a server, which requests can narrow or turn speculation off for, and constrain by grammars."""
    steps = sorted({0, config.num_steps})
    grammars = None if acceptance is not None else LiveGrammars()
    return load_adaptive_engine(
        pair, Settings.of_steps(config, steps), options, acceptance=acceptance, grammars=grammars
    )


def _lark(ebnf: str) -> str:
    """Convert a grammar of GBNF, which SGLang calls EBNF."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError as error:
        raise InputError("ebnf", ebnf, "none without llguidance: pip install 'specsim[grammar]'") from error
    with user_code("ebnf", ebnf, "a grammar with a rule root"):
        return any_to_lark(ebnf)


class Ticket:
    """The outputs of one call of a client; leaving `updates` before their ends aborts them."""

    def __init__(self, service: "Service", jobs: Sequence[Job], updates: "asyncio.Queue[Any]") -> None:
        self._service = service
        self._jobs = jobs
        self._updates = updates

    @property
    def request_ids(self) -> list[int]:
        """Ids of the scheduler's requests."""
        return [job.request.request_id for job in self._jobs]

    async def updates(self) -> AsyncIterator[tuple[int, Progress]]:
        """Yield the progress of each output, with its number, until all have ended.

        Raises InputError for a request that the scheduler rejects, and Unavailable.
        """
        num_open = len(self._jobs)
        try:
            while num_open:
                index, progress = await self._updates.get()
                if isinstance(progress, Exception):
                    raise progress
                request = progress.request
                if request.finish_reason == "rejected":
                    most = f"a request within this server's context length ({request.error})"
                    raise InputError("prompt", f"{len(request.prompt_ids)} tokens", most)
                num_open -= progress.is_final
                yield index, progress
        finally:
            if num_open:
                self._service.abort(self.request_ids)

    async def results(self) -> list[Progress]:
        """Wait for the ends of all outputs."""
        final = {index: progress async for index, progress in self.updates() if progress.is_final}
        return [final[index] for index in range(len(self._jobs))]


class Service:
    """A scheduler that runs in a thread of its own until the service is closed.

    engine: such as load_server_engine makes, or one that wraps it. The service is a context manager.
    """

    def __init__(
        self, pair: Pair, engine: Engine, serving: ServingConfig | None = None, limits: ServerLimits | None = None
    ) -> None:
        self.pair = pair
        self.engine = engine
        self.serving = ServingConfig() if serving is None else serving
        self.limits = ServerLimits() if limits is None else limits
        self.settings = settings_of(engine)
        self.config = max(self.settings, key=lambda config: config.num_steps)
        self.model = pair.name.partition(",")[0]  # name under which clients know it
        self.metrics = Metrics(self.model, self.config)
        self.policy = RequestedSteps(self.settings)
        self.grammar = lru_cache(64)(self._grammar)
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

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, None where it has none."""
        return self.pair.tokenizer

    def submit(self, asks: Sequence[Ask]) -> Ticket:
        """Give requests to the engine thread, from a running event loop.

        Raises InputError for one that cannot run, and Unavailable where the queue is full.
        """
        if not self._is_open:
            raise Unavailable(503, "the server ends")
        most = self.limits.queue + self.serving.max_running
        if len(self._jobs) + len(asks) > most:
            raise Unavailable(429, f"the queue of {self.limits.queue} requests is full; try again later")
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Any] = asyncio.Queue()

        def deliver(index: int, progress: Progress | Exception) -> None:
            with suppress(RuntimeError):  # of a loop that has ended
                loop.call_soon_threadsafe(updates.put_nowait, (index, progress))

        jobs = [self._job(ask, partial(deliver, index)) for index, ask in enumerate(asks)]
        for job in jobs:
            self._jobs[job.request.request_id] = job
            if job.ask.session is not None:
                job.ask.session.running = job.request.request_id
            self._commands.put(partial(self._start, job))
        return Ticket(self, jobs, updates)

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

        def command() -> None:
            self._is_paused = is_paused

        self._commands.put(command)

    @property
    def is_running(self) -> bool:
        """Check whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._jobs)

    def _grammar(self, form: str, text: str) -> Guidance:
        if form == "ebnf":
            form, text = "lark", _lark(text)
        target = self.pair.target.config
        return Guidance(form, text, self.tokenizer, target.vocab_size, target.eos_token_ids)

    def _job(self, ask: Ask, deliver: Callable[[Progress | Exception], None]) -> Job:
        request = self._request(ask)
        grammar = ask.grammar
        if ask.min_tokens:
            grammar = MinTokens(ask.min_tokens, request.stop_ids, self.pair.target.config.vocab_size, grammar)
        if grammar is not None and not isinstance(self.engine.grammars, LiveGrammars):
            raise InputError("grammar", "given", "none on this server, whose engine takes none")
        if ask.num_steps is not None:
            require_int("num_steps", ask.num_steps, 0, self.policy.most)
        make_scorer = None
        if ask.top_logprobs or ask.score_from is not None:
            make_scorer = partial(Scorer, self.engine, request, ask.top_logprobs, ask.score_from, grammar)
        return Job(ask, request, deliver, grammar, make_scorer)

    def _request(self, ask: Ask) -> Request:
        self._serial += 1
        stream = _UNSEEDED + self._serial % _UNSEEDED if ask.seeded_stream is None else ask.seeded_stream
        continues = None if ask.session is None else ask.session.last
        is_text = continues is not None and isinstance(ask.prompt, str)
        prompt = self.tokenizer.encode(ask.prompt, add_special_tokens=False) if is_text else ask.prompt
        keep = ask.session is not None
        request = make_request(self.pair.target.config, self.tokenizer, stream, prompt, ask.params, keep=keep)
        request.request_id |= self._serial << _STREAM_BITS
        request.continues = continues
        return request

    def _make_scheduler(self) -> Scheduler:
        policy = self.policy if hasattr(self.engine, "settings") else None
        return Scheduler(self.engine, self.serving, policy=policy)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._is_open:
                try:
                    self._turn()
                except Exception as error:
                    self._fail(error)

    def _turn(self) -> None:
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
        self._drop_late()
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
        if ask.scores_only:
            request.finish_reason = "length"
            self._finish(job)
            return
        if ask.num_steps is not None:
            self.policy.requested[request.request_id] = ask.num_steps
        if job.grammar is not None and isinstance(self.engine.grammars, LiveGrammars):
            self.engine.grammars[request.request_id] = job.grammar
        try:
            self._scheduler.submit(request)
        except InputError as error:  # of a session that an engine's failure has ended
            self._drop(job, error)

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
        forgotten: int | None = request.request_id
        if (session := job.ask.session) is not None:
            session.running = None
            if request.token_ids and request.finish_reason in ("stop", "length") and not session.is_closed:
                forgotten, session.last, session.rid = session.last, request.request_id, job.ask.rid
        if forgotten is not None:
            self._scheduler.reservations.end_session(forgotten)
            self._scheduler.forget(forgotten)

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
            if session.last is not None:
                self._scheduler.reservations.end_session(session.last)
                self._scheduler.forget(session.last)

        self._commands.put(command)

    def abort_named(self, rid: str) -> None:
        """End the requests of a name, and those of its choices."""

        def command() -> None:
            jobs = self._jobs.values()
            named = [job for job in jobs if job.ask.rid == rid or job.ask.rid.startswith(f"{rid}_")]
            self._abort([job.request.request_id for job in named])

        self._commands.put(command)

    def _drop_late(self) -> None:
        """End the requests that have waited or run for too long."""
        limits, now = self.limits, time.perf_counter()
        for job in list(self._jobs.values()):
            waits = job.request.row < 0 and not job.request.token_ids
            if waits and now - job.start > limits.queue_seconds:
                self._drop(job, Unavailable(503, f"the request waited longer than {limits.queue_seconds:g} s"))
            elif now - job.start > limits.request_seconds:
                self._drop(job, Unavailable(503, f"the request ran longer than {limits.request_seconds:g} s"))

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
