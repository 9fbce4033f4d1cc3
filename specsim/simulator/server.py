"""A simulated server under way: its requests, what they hold, and what the host has not read yet."""

import heapq
from dataclasses import dataclass

import numpy as np

from specsim.simulator.acceptance import Rounds
from specsim.simulator.columns import round_pages
from specsim.simulator.results import Ledger, Run
from specsim.simulator.uniforms import Stream, keys, named_uniforms


@dataclass(frozen=True, slots=True)
class _Results:
    """Tokens on their way to the host, of requests [B], made in a step and there at `seconds`: first ones, or those of
    a round that accepted so many drafts.
    """

    requests: np.ndarray
    seconds: float
    step: int
    accepted: np.ndarray | None
    option: int


class Server:
    """A run under way.

    Arrays by request number: left, tokens that are still to come, and lengths, committed columns (filled, or to be
    filled again), both as far as the host knows; ahead, the device's committed columns; filled, those of a prefill that
    are done.
    """

    def __init__(self, cost, options, workload, serving, prefill, policy, client, seed, log):
        self.cost, self.options, self.policy = cost, options, policy
        self.configs = tuple(option.config for option in options)
        self.serving, self.mode, self.lagging = serving, prefill, serving.schedule == "overlap"
        self.num_pages = serving.num_slots // self.configs[0].page_size
        self.prompts, self.outputs = workload.prompt_tokens, workload.output_tokens
        size = len(workload)
        self.keys = keys(seed, Stream.ROUND, np.arange(size))
        self.left, self.lengths = self.outputs.copy(), self.prompts.copy()
        self.ahead, self.rounds, self.filled = (np.zeros(size, dtype=np.int64) for _ in range(3))
        self.client, self.ledger = client, Ledger(workload, self.configs, log)
        self.waiting: list[tuple[float, int]] = []
        self.running = np.zeros(0, dtype=np.int64)
        self.prefilling: list[int] = []
        self.unread: list[_Results] = []
        self.now = self.planned = 0.0  # when the next step starts; until when its plan knows of arrivals

    def serve(self) -> Run:
        while self.ledger.num_ended < len(self.prompts):
            if not (self.waiting or self.prefilling or len(self.running) or self.unread):
                self.now = self.planned = max(self.now, self.client.next_time)
            self._step()
        return self.ledger.run()

    def _step(self) -> None:
        for arrival in self.client.due(self.planned):
            self.ledger.arrivals[arrival[1]] = arrival[0]
            heapq.heappush(self.waiting, arrival)
        pages = self._plan()
        chunks, due, start = self._chunks(), self.unread, self.now
        self.unread = []
        running, waiting = len(self.running), len(self.waiting)
        option = self._launch(chunks)
        for results in due:
            self._read(results)
        if not self.lagging:
            self._read_all()
        launched = bool(chunks) or option >= 0
        self.planned = start if self.lagging and launched else self.now
        if launched:
            prompt_tokens = sum(end - begin for _, begin, end in chunks)
            self.ledger.step((start, self.now - start, running, len(chunks), waiting, prompt_tokens, option, pages))

    def _plan(self) -> int:
        """Make room for the next round of all who have a place, admit whom there is room for; the pages they need."""
        pages, preempted = self._pages(), False
        while pages > self.num_pages:
            self._preempt()
            pages, preempted = self._pages(), True
        while self.waiting and not preempted and len(self.running) + len(self.prefilling) < self.serving.max_running:
            request = self.waiting[0][1]
            needed = int(round_pages(self.lengths[request], self.configs))
            if pages + needed > self.num_pages:
                break
            heapq.heappop(self.waiting)
            self.filled[request] = 0
            self.prefilling.append(request)
            pages += needed
        return pages

    def _pages(self) -> int:
        pages = self._pages_of(self.running)
        return pages + self._pages_of(np.array(self.prefilling)) if self.prefilling else pages

    def _pages_of(self, requests: np.ndarray) -> int:
        """Of the columns that requests need in their next round, as far as the host knows."""
        return int(np.add.reduce(round_pages(self.lengths[requests], self.configs)))

    def _preempt(self) -> None:
        """Whoever gives way waits, and will compute the KV of its known tokens again."""
        sign = {"latest": 0, "shortest": -1, "longest": 1}[self.serving.preemption]
        placed = [*self.running.tolist(), *self.prefilling]
        self.filled[self.running] = self.lengths[self.running]
        request = max(placed, key=lambda each: (sign * int(self.filled[each]), self.ledger.arrivals[each], each))
        self.running = self.running[self.running != request]
        self.prefilling = [each for each in self.prefilling if each != request]
        self.ledger.preemptions[request] += 1
        heapq.heappush(self.waiting, (float(self.ledger.arrivals[request]), request))

    def _chunks(self) -> list[tuple[int, int, int]]:
        """(request, first column, end) of what this step prefills, oldest place first."""
        left, chunks = self.serving.chunk_tokens, []
        for request in self.prefilling:
            start, length = int(self.filled[request]), int(self.lengths[request])
            end = length if left is None else min(length, start + left)
            if end > start:
                left = None if left is None else left - (end - start)
                chunks.append((request, start, end))
        return chunks

    def _launch(self, chunks: list[tuple[int, int, int]]) -> int:
        """Let the device do the step; the option of its round, -1 without one."""
        if self.mode == "mixed":
            return self._mixed(chunks)
        if chunks:
            new, behind = _tokens(chunks)
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

    def _mixed(self, chunks: list[tuple[int, int, int]]) -> int:
        if not chunks and not len(self.running):
            return -1
        contexts = self.ahead[self.running]
        option = self.policy.choose(contexts) if len(contexts) else -1
        config = self.configs[option if len(contexts) else 0]
        if chunks:
            seconds = self.cost.mixed(*_tokens(chunks), contexts, config)
        else:
            seconds = self.cost.round(contexts, config)
        if len(contexts):
            self._round(option, contexts, seconds)
        else:
            self.now += seconds
        self._join(chunks)
        return option

    def _join(self, chunks: list[tuple[int, int, int]]) -> None:
        """Prompts that are complete make their first token, and their requests run from the next round on."""
        whole = []
        for request, _, end in chunks:
            self.filled[request] = end
            if end == self.lengths[request]:
                whole.append(request)
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
        requests, steps = self.running, self.configs[option].num_steps
        accepted = self._accepted(option, contexts) if steps else np.zeros(len(requests), dtype=np.int64)
        self.policy.observe(option, accepted, seconds)
        self.now += seconds
        self.ahead[requests] = contexts + accepted + 1
        self.rounds[requests] += 1
        self.unread.append(_Results(requests, self.now, self.ledger.num_steps, accepted, option))

    def _accepted(self, option: int, contexts: np.ndarray) -> np.ndarray:
        requests, law, steps = self.running, self.options[option].acceptance, self.configs[option].num_steps
        positions = contexts - self.prompts[requests]
        accepted = law.accepted(
            Rounds(requests, self.rounds[requests], positions, named_uniforms(self.keys[requests], positions))
        )
        return np.minimum(accepted, steps) if law.num_steps > steps else accepted

    def _read_all(self) -> None:
        for results in self.unread:
            self._read(results)
        self.unread = []

    def _read(self, results: _Results) -> None:
        """The host learns of tokens; what is beyond a request's end is dropped, and who has ended leaves."""
        requests, accepted = results.requests, results.accepted
        left = self.left[requests]
        if accepted is None:
            left -= 1
            self.ledger.first(requests, results.seconds, results.step)
        else:
            if self.lagging and not left.all():
                alive = left > 0
                requests, accepted, left = requests[alive], accepted[alive], left[alive]
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
        """Whose tokens are complete leaves, whether it runs or waits since a preemption."""
        self.running = self.running[self.left[self.running] > 0]
        if self.waiting and self.lagging:
            self.waiting = [each for each in self.waiting if self.left[each[1]]]
            heapq.heapify(self.waiting)
        for _ in range(num_ended):
            self.client.ended(seconds)


def _tokens(chunks: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each chunk, and those before it."""
    columns = np.array(chunks, dtype=np.int64)
    return columns[:, 2] - columns[:, 1], columns[:, 1]
