"""A running simulated server: its requests, their columns, and results that the host has not read yet."""

import heapq
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from specsim.core.config import ServingConfig
from specsim.simulator.acceptance import Rounds
from specsim.simulator.chunks import Chunk, next_chunks, sizes
from specsim.simulator.client import Arrival, Client
from specsim.simulator.columns import round_pages
from specsim.simulator.option import Cost, Option, Policy
from specsim.simulator.results import Ledger, Run, Step
from specsim.simulator.uniforms import Stream, keys, named_uniforms
from specsim.simulator.workload import Workload

Prefill = Literal["mixed", "beside", "first"]
PREFILLS = get_args(Prefill)


@dataclass(frozen=True, slots=True)
class _Results:
    """Tokens of a step on their way to the host: first tokens, or those of a round."""

    requests: np.ndarray  # int64 [B]
    seconds: float  # time at which the host can read them
    step: int
    accepted: np.ndarray | None  # int64 [B], drafts that the round accepted; None for first tokens
    option: int  # of the round, -1 for first tokens


class Server:
    """A running simulation, arrays by request number."""

    def __init__(
        self,
        cost: Cost,
        options: tuple[Option, ...],
        workload: Workload,
        serving: ServingConfig,
        prefill: Prefill,
        policy: Policy,
        seed: int,
        log: bool,
    ) -> None:
        size = len(workload)
        self.cost = cost
        self.options = options
        self.configs = tuple(option.config for option in options)
        self.serving = serving
        self.mode = prefill
        self.policy = policy
        self.lagging = serving.schedule == "overlap"
        self.num_pages = serving.num_slots // self.configs[0].page_size
        self.keys = keys(seed, Stream.ROUND, np.arange(size))
        self.prompts = workload.prompt_tokens
        self.outputs = workload.output_tokens
        self.cached = workload.cached_columns
        self.left = self.outputs.copy()  # tokens still to come, known to the host
        self.lengths = self.prompts.copy()  # committed columns, filled or to be filled again, known to the host
        self.ahead = np.zeros(size, dtype=np.int64)  # committed columns on the device
        self.rounds = np.zeros(size, dtype=np.int64)
        self.filled = np.zeros(size, dtype=np.int64)  # prefilled columns
        self.client = Client(workload)
        self.ledger = Ledger(workload, self.configs, log)
        self.waiting: list[Arrival] = []  # a heap
        self.running = np.zeros(0, dtype=np.int64)
        self.prefilling: list[int] = []
        self.unread: list[_Results] = []
        self.now = 0.0  # start of the next step
        self.planned = 0.0  # arrivals up to this time are known to its plan

    def serve(self) -> Run:
        """Run until every request has ended."""
        while self.ledger.num_ended < len(self.prompts):
            if not (self.waiting or self.prefilling or len(self.running) or self.unread):
                self.now = max(self.now, self.client.next_time)
                self.planned = self.now
            self._step()
        return self.ledger.run()

    def _step(self) -> None:
        for arrival in self.client.due(self.planned):
            self.ledger.arrivals[arrival.request] = arrival.sent
            heapq.heappush(self.waiting, arrival)
        pages = self._plan()
        chunks = next_chunks(self.prefilling, self.filled, self.lengths, self.serving.chunk_tokens)
        due = self.unread
        self.unread = []
        start = self.now
        running = len(self.running)
        waiting = len(self.waiting)
        option = self._launch(chunks)
        for results in due:
            self._read(results)
        if not self.lagging:
            self._read_all()
        launched = bool(chunks) or option >= 0
        self.planned = start if self.lagging and launched else self.now
        if launched:
            prompt_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            seconds = self.now - start
            self.ledger.step(Step(start, seconds, running, len(chunks), waiting, prompt_tokens, option, pages))

    def _plan(self) -> int:
        """Reserve pages for the next round of running requests and admit others; returns the pages in use."""
        pages = self._pages()
        preempted = pages > self.num_pages
        while pages > self.num_pages:
            self._preempt()
            pages = self._pages()
        while self.waiting and not preempted and len(self.running) + len(self.prefilling) < self.serving.max_running:
            request = self.waiting[0].request
            needed = int(round_pages(self.lengths[request], self.configs))
            if pages + needed > self.num_pages:
                break
            heapq.heappop(self.waiting)
            self.filled[request] = 0 if self.ledger.preemptions[request] else self.cached[request]
            self.prefilling.append(request)
            pages += needed
        return pages

    def _pages(self) -> int:
        pages = self._pages_of(self.running)
        return pages + self._pages_of(np.array(self.prefilling)) if self.prefilling else pages

    def _pages_of(self, requests: np.ndarray) -> int:
        """Count the pages of the columns that requests need in their next round, as known to the host."""
        return int(np.add.reduce(round_pages(self.lengths[requests], self.configs)))

    def _preempt(self) -> None:
        """Preempt a victim: it waits, and computes the KV of its known tokens again."""
        sign = {"latest": 0, "shortest": -1, "longest": 1}[self.serving.preemption]
        placed = [*self.running.tolist(), *self.prefilling]
        self.filled[self.running] = self.lengths[self.running]
        victim = max(placed, key=lambda each: (sign * int(self.filled[each]), self.ledger.arrivals[each], each))
        self.running = self.running[self.running != victim]
        self.prefilling = [each for each in self.prefilling if each != victim]
        self.ledger.preemptions[victim] += 1
        heapq.heappush(self.waiting, Arrival(float(self.ledger.arrivals[victim]), victim))

    def _launch(self, chunks: list[Chunk]) -> int:
        """Run the step on the device; returns the option of its round, -1 without one."""
        if self.mode == "mixed":
            return self._mixed(chunks)
        if chunks:
            new, behind = sizes(chunks)
            self.now += self.cost.prefill(new, behind)
            self._join(chunks)
            if not self.lagging:
                self._read_all()
        if not len(self.running) or (chunks and self.mode == "first"):
            return -1
        contexts = self.ahead[self.running]
        option = self.policy.choose(contexts)
        seconds = self.cost.round(contexts, self.configs[option])
        self._round(option, contexts, seconds)
        return option

    def _mixed(self, chunks: list[Chunk]) -> int:
        if not chunks and not len(self.running):
            return -1
        contexts = self.ahead[self.running]
        option = self.policy.choose(contexts) if len(contexts) else -1
        config = self.configs[option if len(contexts) else 0]
        if chunks:
            seconds = self.cost.mixed(*sizes(chunks), contexts, config)
        else:
            seconds = self.cost.round(contexts, config)
        if len(contexts):
            self._round(option, contexts, seconds)
        else:
            self.now += seconds
        self._join(chunks)
        return option

    def _join(self, chunks: list[Chunk]) -> None:
        """Produce the first token of every complete prompt; its request runs from the next round on."""
        for chunk in chunks:
            self.filled[chunk.request] = chunk.end
        whole = [chunk.request for chunk in chunks if chunk.end == self.lengths[chunk.request]]
        if not whole:
            return
        self.prefilling = [each for each in self.prefilling if each not in whole]
        joined = np.array(whole)
        self.running = np.append(self.running, joined)
        fresh = joined[self.left[joined] == self.outputs[joined]]
        self.ahead[joined] = self.lengths[joined]
        if len(fresh):
            self.unread.append(_Results(fresh, self.now, self.ledger.num_steps, None, -1))

    def _round(self, option: int, contexts: np.ndarray, seconds: float) -> None:
        requests = self.running
        steps = self.configs[option].num_steps
        accepted = self._accepted(option, contexts) if steps else np.zeros(len(requests), dtype=np.int64)
        self.policy.observe(option, accepted, seconds)
        self.now += seconds
        self.ahead[requests] = contexts + accepted + 1
        self.rounds[requests] += 1
        self.unread.append(_Results(requests, self.now, self.ledger.num_steps, accepted, option))

    def _accepted(self, option: int, contexts: np.ndarray) -> np.ndarray:
        requests = self.running
        acceptance = self.options[option].acceptance
        steps = self.configs[option].num_steps
        positions = contexts - self.prompts[requests]
        uniforms = named_uniforms(self.keys[requests], positions)
        accepted = acceptance.accepted(Rounds(requests, self.rounds[requests], positions, uniforms))
        return np.minimum(accepted, steps) if acceptance.num_steps > steps else accepted

    def _read_all(self) -> None:
        for results in self.unread:
            self._read(results)
        self.unread = []

    def _read(self, results: _Results) -> None:
        """Read tokens on the host; drop those beyond a request's end, and remove ended requests."""
        requests = results.requests
        accepted = results.accepted
        left = self.left[requests]
        if accepted is None:
            left -= 1
            self.ledger.first(requests, results.seconds, results.step)
        else:
            if self.lagging and not left.all():
                alive = left > 0
                requests = requests[alive]
                accepted = accepted[alive]
                left = left[alive]
            kept = np.minimum(accepted + 1, left)
            left -= kept
            self.lengths[requests] += kept
            self.ledger.round(requests, results.seconds, accepted, results.option)
        self.left[requests] = left
        if not left.all():
            ended = requests[left == 0]
            self.ledger.ended(ended, results.step)
            self._end(len(ended), results.seconds)

    def _end(self, num_ended: int, seconds: float) -> None:
        """Remove requests that have all of their tokens, whether running or waiting after a preemption."""
        self.running = self.running[self.left[self.running] > 0]
        if self.waiting and self.lagging:
            self.waiting = [each for each in self.waiting if self.left[each.request]]
            heapq.heapify(self.waiting)
        for _ in range(num_ended):
            self.client.ended(seconds)
