"""Continuous batching on a clock: order of service, seconds of every step, time of every token.

The schedule is that of the scheduler that serves requests, serving.loop. Under `overlap` a step is planned before the
results of the one before it are known, so a request that has ended takes part in one more round.
"""

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.page_pool import PagePool
from specsim.core.policies.policy import Always, AnyPolicy, observe
from specsim.serving.loop import ServingLoop
from specsim.serving.reservations import Reservations
from specsim.simulator.acceptance import Cost, Option
from specsim.simulator.results import LoggedStep, Quantiles, SimulatedRun
from specsim.simulator.runner import (
    PREFILLS,
    Chunks,
    Prefill,
    SimulatedAdaptation,
    SimulatedRequest,
    SimulatedResults,
    SimulatedRunner,
    draw_all,
    numbers,
)
from specsim.simulator.uniforms import UniformStream, keys
from specsim.simulator.workload import SimulatedWorkload

MOST_GAPS = 2**13  # gaps that are kept before they are counted


class Arriving:
    """Requests of a workload that are still to be sent, behind the front end."""

    def __init__(self, workload: SimulatedWorkload) -> None:
        self._intake = workload.intake
        self._latency = workload.latency
        size = len(workload)
        arrivals = [0.0] * size if workload.arrivals_s is None else workload.arrivals_s.tolist()
        self._seconds = arrivals  # from when the client may send each request
        self._most_in_flight = size if workload.concurrency is None else workload.concurrency
        self._idle = 0.0  # seconds, when the front end is free
        self.count = 0  # requests that were sent
        self._ends: list[float] = []  # seconds of the first, second, ... end of any request
        self._expect()

    @property
    def num_ended(self) -> int:
        """Number of requests that have ended."""
        return len(self._ends)

    def _expect(self) -> None:
        """Compute the time of the next request if none ends before; infinity without one, or a client for it."""
        before = self.count - self._most_in_flight  # as many requests have ended when this one is sent
        self._sent = inf
        if self.count < len(self._seconds) and before < len(self._ends):
            self._sent = max(self._seconds[self.count], self._ends[before] if before >= 0 else 0.0)
        self.ready = max(self._sent, self._idle) + self._intake + self._latency  # when it reaches the scheduler

    def take(self) -> float:
        """Take in the next request, and return the time at which it was sent."""
        sent = self._sent
        self._idle = self.ready - self._latency
        self.count += 1
        self._expect()
        return sent

    def end(self, seconds: float) -> None:
        """Note the end of a request."""
        self._ends.append(seconds)
        if self._sent == inf:
            self._expect()


class PageCounts(Reservations):
    """Reservations that count the pages of all next rounds and hold none, which admits the same requests."""

    num_needed = 0  # pages of the admitted requests' next rounds
    counts = True  # whether the pages may run out, or are logged

    def make_room(self, admitted_requests: Collection[Any]) -> bool:
        return not self.counts or super().make_room(admitted_requests)

    def growth(self, admitted_requests: Collection[Any]) -> int:
        if not self.counts:
            return 0
        pages = self._round_pages
        self.num_needed = sum([pages[request.prefill_len] for request in admitted_requests])
        return self.num_needed

    def _reserve_prefill(self, request: Any) -> None:
        pass

    def reserve(self, requests: Collection[Any]) -> None:
        pass

    def mark_committed(self, request: Any, columns: int) -> None:
        request.committed = columns

    def committed(self, request: Any) -> int:
        return request.committed


class SimulatedServer(ServingLoop):
    """A serving loop over a simulated runner, on the runner's clock."""

    def __init__(
        self,
        cost: Cost,
        options: Sequence[Option],
        workload: SimulatedWorkload,
        serving: ServingConfig,
        prefill: Prefill,
        policy: AnyPolicy,
        seed: int,
        log: bool,
    ) -> None:
        configs = tuple(option.config for option in options)
        fixed = policy.setting if type(policy) is Always else None  # the option of every round
        uniforms = keys(seed, UniformStream.ROUND, np.arange(len(workload)))
        self._drawn = draw_all(None if fixed is None else options[fixed], uniforms, workload)
        self._runner: Any = SimulatedRunner(cost, options, prefill, fixed, uniforms)
        places = min(serving.max_running, len(workload))
        page_size = configs[0].page_size
        request_pages = int(most_request_pages(configs, workload).max())
        num_pages = min(serving.num_slots // page_size, places * request_pages)
        counts = log or num_pages < places * request_pages
        pool = PagePool((num_pages if counts else request_pages) * page_size, page_size, places)
        self._pages = PageCounts(pool, configs, prefix_cache=False)
        self._pages.counts = counts
        if self._drawn is not None:
            self._runner.draws = "accepted" if counts else "contexts"
        super().__init__(serving, pool, self._pages, self._runner)
        if fixed is None:
            self.adaptation: Any = SimulatedAdaptation(policy)
        self._workload = workload
        self._prefill_mode = prefill
        self._policy = policy
        self._fixed = fixed
        self._keeps_log = log
        self._arriving = Arriving(workload)
        self._planned = 0.0  # seconds; arrivals up to this time are known to the next plan
        self._gaps: list[float] = []
        self._gap_counts: list[int] = []
        self._quantiles = Quantiles()
        self._histograms = [[0] * (config.num_steps + 1) for config in configs]
        # Where no request is preempted, the number of its rounds is known, and they follow each other.
        self._drawn_rounds = None if counts else self._drawn
        self._num_read = 0  # rounds
        self._num_decoding = 0  # requests whose first token is read
        self._fresh: list[Any] = []  # those of them without a round that is read
        self._last_ready = 0.0  # seconds, when the last round was read
        self._last_rounds: dict[int, list[Any]] = {}  # requests by the number of their last round
        self._steps: list[LoggedStep] = []

    def serve(self) -> SimulatedRun:
        """Run until every request has ended."""
        size = len(self._workload)
        arriving = self._arriving
        while arriving.num_ended < size:
            if not self._runner.requests and not self.is_busy:
                self._runner.now = max(self._runner.now, arriving.ready)
                self._planned = self._runner.now
            while arriving.ready <= self._planned:
                self.submit(self._request(arriving.count, arriving.take()))
            self.step()
        self._count_gaps()
        return self._run()

    def _request(self, number: int, sent: float) -> Any:
        work = self._workload
        prompt, output = int(work.prompt_tokens[number]), int(work.output_tokens[number])
        cached = 0 if work.cached_tokens is None else int(work.cached_tokens[number])
        draws: Any = iter(())
        if self._drawn is not None:
            draws = self._drawn.contexts(number, prompt) if self._drawn_rounds else self._drawn.of(number)
        return SimulatedRequest(number, self.step_index, sent, prompt, output, cached, draws, prompt, output)

    def step(self) -> None:
        """Plan, launch and read once."""
        runner = self._runner
        start = runner.now
        mode = self._prefill_mode
        plan = self.plan()
        pages = self._pages.num_needed
        waiting = len(self._queue.waiting)
        shares = mode == "mixed" and bool(plan.requests)
        runner.shared_chunks = Chunks.of(plan.chunks) if shares else None
        if plan.requests and not shares:
            self.prefill(plan)
        running = 0 if mode == "first" and plan.requests else len(runner.requests)
        if running or shares:
            self.decode()
        if shares:
            self.prefill(plan)
        self.read_due()
        has_launched = bool(running or plan.requests)
        self._planned = start if has_launched and self.serving.schedule == "overlap" else runner.now
        if has_launched:
            runner.ordinal += 1
            if self._keeps_log:
                new_tokens = sum(end - start for start, end in plan.chunks)
                option = self._option if running else -1
                seconds = runner.now - start
                self._steps.append(
                    LoggedStep(start, seconds, running, len(plan.chunks), waiting, new_tokens, option, pages)
                )
        self._log.step += 1
        self._log.events.clear()

    @property
    def _option(self) -> int:
        """Option of this step's round."""
        return self._log.setting if self._fixed is None else self._fixed

    def _prepare(self, request: Any) -> None:
        """Reject no request, as `check` has done that."""

    def _note_round(self) -> None:
        """Note nothing of a round, as its step keeps its number only."""

    def _note_admitted(self, request: Any) -> None:
        request.committed = 0 if request.num_preemptions else request.cached

    def _read(self, launched: Any) -> None:
        if launched.is_round and self._drawn_rounds:
            self._read_drawn_round(launched)
        elif launched.is_round:
            self._read_round(launched)
        else:
            self._read_firsts(launched)
        if len(self._gaps) * max(1, self._num_decoding) >= MOST_GAPS:
            self._count_gaps()

    def _count_gaps(self) -> None:
        self._quantiles.add(np.array(self._gaps), np.array(self._gap_counts, dtype=np.int64))
        self._gaps.clear()
        self._gap_counts.clear()

    def _read_firsts(self, results: SimulatedResults) -> None:
        """Read first tokens."""
        for request in results.requests:
            request.remaining -= 1
            request.first = request.last = results.ready
            request.first_step = results.ordinal
            if not request.remaining:
                self._end(request, results)
            elif self._drawn_rounds:
                self._num_decoding += 1
                self._fresh.append(request)
                last_round = self._num_read + self._drawn_rounds.count(request.request_id)
                self._last_rounds.setdefault(last_round, []).append(request)

    def _read_drawn_round(self, results: SimulatedResults) -> None:
        """Read a round of requests that run in every round from their first to their last one."""
        ready = results.ready
        self._gaps.append(ready - self._last_ready)
        self._gap_counts.append(self._num_decoding - len(self._fresh))
        if self._fresh:
            self._gaps += [ready - request.first for request in self._fresh]
            self._gap_counts += [1] * len(self._fresh)
            self._fresh.clear()
        self._last_ready = ready
        self._num_read += 1
        for request in self._last_rounds.pop(self._num_read, ()):
            self._num_decoding -= 1
            request.last = ready
            self._end(request, results)

    def _read_round(self, results: SimulatedResults) -> None:
        """Read the tokens of a round, and drop those beyond a request's end."""
        ready, gaps = results.ready, self._gaps
        histogram = self._histograms[results.choice.setting]
        if self.adaptation and results.requests:
            accepted = np.array(results.accepted, dtype=np.int64)
            observe(self._policy, numbers(results.requests), results.choice, accepted, results.duration)
        for request, drafts in zip(results.requests, results.accepted, strict=True):
            remaining = request.remaining
            if not remaining:  # it ended while this round ran
                continue
            num_tokens = drafts + 1 if drafts < remaining else remaining
            request.remaining = remaining - num_tokens
            request.prefill_len = request.committed = request.prefill_len + num_tokens
            gaps.append(ready - request.last)
            self._gap_counts.append(1)
            request.last = ready
            request.rounds += 1
            request.drafts += drafts
            histogram[drafts] += 1
            if num_tokens == remaining:
                self._end(request, results)

    def _end(self, request: Any, results: SimulatedResults) -> None:
        """Note the end of a request."""
        request.last_step = results.ordinal
        request.draws = iter(())
        self._arriving.end(results.ready)
        self._finish(request, "length")

    def _seconds(self) -> float:
        return self._runner.now

    def _run(self) -> SimulatedRun:
        requests: list[Any] = list(self.requests.values())
        names = ("sent", "first", "last", "first_step", "last_step", "rounds", "drafts", "num_preemptions")
        columns = [np.array([getattr(request, name) for request in requests]) for name in names]
        arrivals, firsts, lasts, first_steps, last_steps, rounds, drafts, preemptions = columns
        work = self._workload
        histograms = [np.array(histogram) for histogram in self._histograms]
        if self._drawn_rounds and self._fixed is not None:
            rounds, drafts, histograms[self._fixed] = self._drawn_rounds.totals(
                work.output_tokens > 1, histograms[self._fixed]
            )
        return SimulatedRun(
            arrivals=arrivals,
            firsts=firsts,
            lasts=lasts,
            first_steps=first_steps,
            last_steps=last_steps,
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            rounds=rounds,
            drafts=drafts,
            preemptions=preemptions,
            gaps=self._quantiles,
            accepted_drafts=tuple(histograms),
            num_steps=self._runner.ordinal,
            log=self._steps,
        )


@check_arguments
def simulate(
    cost: Cost,
    options: Option | Sequence[Option],
    workload: SimulatedWorkload,
    serving: ServingConfig | None = None,
    *,
    prefill: Prefill = "mixed",
    policy: AnyPolicy | None = None,
    seed: int = 0,
    log: bool = False,
) -> SimulatedRun:
    """Serve a workload; the same arguments give the same run, bit for bit.

    prefill: prompts are processed in the round's own forward (`mixed`, as in vLLM), in a separate forward of the same
    step before the round (`beside`, as in serving.scheduler), or in a forward that rounds wait for (`first`, as in
    SGLang). policy: chooses among several options. log: keep a record of every step. serving: by default 256 places,
    slots for all, and the cost model's schedule.
    """
    options = (options,) if isinstance(options, Option) else tuple(options)
    if serving is None:
        serving = ServingConfig(getattr(cost, "schedule", "sync"), max_running=256, num_slots=2**31 - 1)
    check(cost, options, workload, serving, prefill)
    return SimulatedServer(cost, options, workload, serving, prefill, policy or Always(), seed, log).serve()


def check(
    cost: Cost, options: Sequence[Option], workload: SimulatedWorkload, serving: ServingConfig, prefill: str
) -> None:
    """Raise InputError for a workload or a setting that simulate cannot serve."""
    require_choice("prefill", prefill, PREFILLS)
    if not options or len({option.config.page_size for option in options}) != 1:
        raise InputError("options", f"{len(options)} settings", "at least one, all of one page_size")
    require(not serving.prefix_cache, "prefix_cache", True, "False: requests of a workload have lengths and no tokens")
    schedule = getattr(cost, "schedule", serving.schedule)
    require(schedule == serving.schedule, "schedule", serving.schedule, f"that of the cost model, {schedule}")
    if serving.schedule == "overlap" and any(option.config.release == "round" for option in options):
        raise InputError("schedule", "overlap", "sync with release 'round', which frees slots after every round")
    configs = tuple(option.config for option in options)
    needed = most_request_pages(configs, workload) * configs[0].page_size
    if needed.max() > serving.num_slots:
        request = int(needed.argmax())
        raise InputError("num_slots", serving.num_slots, f"at least {needed[request]}, which request {request} needs")


def most_request_pages(configs: tuple[SpecConfig, ...], workload: SimulatedWorkload) -> np.ndarray:
    """Compute the most pages that each request needs for a round, int64 [R].

    Lanes' copies of a prefix's tail grow with it: a round from the last token of a page may need most pages.
    """
    last = workload.prompt_tokens + np.maximum(workload.output_tokens - 2, 0)
    fullest = np.maximum(last - last % configs[0].page_size - 1, workload.prompt_tokens)
    return np.maximum(round_pages(last, configs), round_pages(fullest, configs))


def round_columns(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Compute the most columns, int64 [B], that requests of these lengths [B] own in their next round."""
    columns = _reach(lengths, config)
    page = config.page_size
    return -(-columns // page) * page if config.release == "finish" else columns


def round_pages(lengths: np.ndarray, configs: tuple[SpecConfig, ...]) -> np.ndarray:
    """Compute the pages of these columns, int64 [B], where the next round may have any of several settings.

    All settings have the same page size.
    """
    columns = _reach(lengths, configs[0])
    for config in configs[1:]:
        columns = np.maximum(columns, _reach(lengths, config))
    return -(-columns // configs[0].page_size)


def _reach(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Compute the same columns before rounding to whole pages."""
    if config.release == "finish":
        return np.minimum(lengths, config.length_limit) + 2 * config.need
    page = config.page_size
    tail = 0 if config.lanes_share_prefix else lengths % page
    stride = config.num_steps if config.lanes_share_prefix else -(-(tail + config.num_steps) // page) * page
    return np.maximum(lengths - tail + config.topk * stride, lengths + config.num_draft_tokens)
