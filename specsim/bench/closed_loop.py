"""A closed loop of clients over the scheduler, the figures that clients see, and warm-up runs before it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from specsim.bench.clock import without_collection
from specsim.bench.request_lengths import Lengths
from specsim.bench.row import Check, all_of, equal
from specsim.core.config import SamplingParams, ServingConfig
from specsim.core.engine import Engine
from specsim.core.pool import KVPool
from specsim.models.shapes import random_prompts
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

MOST_RUNS = 4  # of a load, the last one timed


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a served load, as benchmark clients report them."""

    tokens_per_s: float  # output tokens of all requests
    tpot_s: float  # mean over requests of the seconds per token after the first
    ttft_s: float  # mean

    @classmethod
    def of(cls, output_tokens: np.ndarray, arrivals: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> "Figures":
        """Compute them from each request's tokens, and its seconds of arrival, first and last delivery."""
        more = output_tokens > 1
        tpot = (lasts - firsts)[more] / (output_tokens[more] - 1)
        duration = float(lasts.max() - arrivals.min())
        return cls(float(output_tokens.sum()) / duration, float(tpot.mean()), float((firsts - arrivals).mean()))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients of one engine, whose pools all runs share, so that every graph is captured once.

    Each of `concurrency` clients sends its next request when its last one has ended.
    """

    engine: Engine
    pools: KVPool
    lengths: Lengths
    prompts: Sequence[Sequence[int]]  # the requests', in order
    chunk_tokens: int | None = None

    @classmethod
    def of(cls, engine: Engine, lengths: Lengths, concurrency: int, chunk_tokens: int | None = None) -> "ClosedLoop":
        """Make pools for up to `concurrency` clients and random prompts."""
        longest = int((lengths.prompt_tokens + lengths.output_tokens).max())
        room = concurrency * (engine.config.reserved_columns(longest) + 4 * engine.config.page_size)
        pools = engine.make_pools(2 * concurrency, room)
        (words,) = random_prompts(1, int(lengths.prompt_tokens.sum()), engine.target.config.vocab_size)
        ends = lengths.prompt_tokens.cumsum()
        starts = ends - lengths.prompt_tokens
        prompts = [words[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return cls(engine, pools, lengths, prompts, chunk_tokens)

    def serving(self, schedule: str, concurrency: int) -> ServingConfig:
        """Make the scheduler's setting."""
        config = ServingConfig(max_running=concurrency, num_slots=self.pools.num_slots, chunk_tokens=self.chunk_tokens)
        return replace(config, schedule=schedule)

    @torch.inference_mode()
    def run(self, schedule: str, concurrency: int, count: int) -> list[Request]:
        """Serve the first `count` requests to their ends."""
        scheduler = Scheduler(self.engine, self.serving(schedule, concurrency), pools=self.pools)
        coming = self._requests(count)
        with without_collection():
            for _ in range(min(concurrency, count)):
                scheduler.submit(next(coming))
            while scheduler.is_busy:
                for _ in scheduler.step().finished:
                    if (request := next(coming, None)) is not None:
                        request.arrival = scheduler.step_index
                        scheduler.submit(request)
        scheduler.close()
        return list(scheduler.requests.values())

    @torch.inference_mode()
    def decoding(self, schedule: str, concurrency: int, steps: int, prompt_len: int) -> "Decoding":
        """Begin equal requests that decode together."""
        serving = replace(self.serving(schedule, concurrency), chunk_tokens=None)  # all prompts in the first step
        scheduler = Scheduler(self.engine, serving, pools=self.pools)
        for number in range(concurrency):
            prompt = [*self.prompts[number % len(self.prompts)], *self.prompts[0]] * prompt_len
            scheduler.submit(self._request(number, prompt[:prompt_len], 1 + steps * (self.engine.config.num_steps + 1)))
        decoding = Decoding(scheduler)
        decoding.steps(2)
        return decoding

    def _requests(self, count: int) -> Iterator[Request]:
        for number, tokens in enumerate(self.lengths.output_tokens[:count].tolist()):
            yield self._request(number, self.prompts[number], tokens)

    def _request(self, request_id: int, prompt: Sequence[int], max_new_tokens: int) -> Request:
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        return make_request(self.engine.target.config, None, request_id, prompt, params)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Requests that do not end, so that every step is a round of the same batch."""

    scheduler: Scheduler

    @torch.inference_mode()
    def steps(self, count: int) -> None:
        """Run some steps."""
        for _ in range(count):
            self.scheduler.step()

    def results(self, rounds: int) -> dict[str, torch.Tensor]:
        """Collect tokens and their log probabilities of the prefill and the first rounds, of all requests."""
        requests = list(self.scheduler.requests.values())
        counts = [1 + sum(request.accepted[:rounds]) for request in requests]
        pairs = list(zip(requests, counts, strict=True))
        logprobs = [logprob for request, count in pairs for logprob in request.logprobs[:count]]
        return {
            "tokens": torch.tensor([token for request, count in pairs for token in request.token_ids[:count]]),
            "logprobs": torch.tensor(logprobs, dtype=torch.float64),
        }

    @torch.inference_mode()
    def close(self) -> None:
        """Abort the requests."""
        self.scheduler.close()


def figures_of(requests: Sequence[Request]) -> Figures:
    """Compute the figures of finished requests by the scheduler's clock."""
    arrivals = np.array([request.arrived.seconds if request.arrived else np.nan for request in requests])
    firsts, lasts = (np.array([request.emissions[index].seconds for request in requests]) for index in (0, -1))
    tokens = np.array([len(request.token_ids) for request in requests])
    return Figures.of(tokens, arrivals, firsts, lasts)


def check_served(compared: str, served: Sequence[Request], expected: Sequence[Request], with_tokens: bool) -> Check:
    """Compare requests of two runs: tokens received, drafts accepted in every round, and with_tokens the tokens.

    Batches of other sizes round otherwise, so in bf16 tokens may differ where batches do.
    """
    return equal(compared, _results(served, with_tokens), _results(expected, with_tokens))


def check_schedules(loop: ClosedLoop, concurrency: int, rounds: int, prompt_len: int) -> Check:
    """Compare tokens and log probabilities of both schedules, bit for bit, over rounds of equal batches."""
    results = []
    for schedule in ("overlap", "sync"):
        decoding = loop.decoding(schedule, concurrency, rounds + 4, prompt_len)
        decoding.steps(rounds)
        results.append(decoding.results(rounds))
        decoding.close()
    compared = f"tokens and log probabilities of {rounds} rounds of {concurrency} requests in the other schedule"
    return all_of(compared, equal(compared, *results))


def _results(requests: Sequence[Request], with_tokens: bool) -> dict[str, torch.Tensor]:
    ordered = sorted(requests, key=lambda request: request.request_id)
    tensors = {
        "number of tokens": torch.tensor([len(request.token_ids) for request in ordered]),
        "accepted tokens of every round": torch.tensor([count for request in ordered for count in request.accepted]),
    }
    if with_tokens:
        tensors["tokens"] = torch.tensor([token for request in ordered for token in request.token_ids])
    return tensors


@dataclass(slots=True)
class Builds:
    """Work that a repetition of the same part does not do again."""

    graphs: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)  # loaded into the GPU, most of them compiled just before
    blocks: int = 0  # of memory, obtained from the driver

    @property
    def delays(self) -> list[str]:
        """The graphs and kernels, each of which takes at least a tenth of a second."""
        return [*self.graphs, *self.kernels]


@contextmanager
def noted(engine: Engine) -> Iterator[Builds]:
    """Note what an engine builds; complete at the end."""
    from triton import knobs

    builds = Builds()
    graphs, blocks = _graphs(engine), _blocks()
    loaded = knobs.runtime.kernel_load_end_hook

    def note(module: object, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        builds.kernels.append(name)

    loaded.add(note)
    try:
        yield builds
    finally:
        loaded.remove(note)
    builds.graphs += [name for name in _graphs(engine) if name not in graphs]
    builds.blocks = _blocks() - blocks


def _graphs(engine: Any) -> list[str]:
    """Name the graphs that an engine holds; only the fast engine has any."""
    prompts = engine._prompts
    return [
        *(f"round of {frame.bucket}" for frame in engine._frames),
        *(f"prompts of {rows} rows, {count} requests" for rows, count in (prompts._graphs if prompts else ())),
    ]


def _blocks() -> int:
    """Count the blocks of memory that this process obtained from the driver, on the GPU and in pinned memory."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.memory_stats()["num_device_alloc"] + torch.cuda.host_memory_stats()["num_host_alloc"]


@dataclass(frozen=True, slots=True)
class WarmedRun:
    """The requests of a load in whose time nothing was recorded, compiled or allocated."""

    requests: list[Request]
    check: Check
    note: str


def warmed_run(loop: ClosedLoop, schedule: str, concurrency: int, count: int) -> WarmedRun:
    """Serve a load until a run needs no new graph, kernel or block of memory; earlier runs do not count.

    A graph's recording gives unused memory back, so that the run after it obtains blocks again. The last of MOST_RUNS
    counts if blocks are all that it needed.
    """
    earlier_runs: list[str] = []
    while True:
        with noted(loop.engine) as builds:
            requests = loop.run(schedule, concurrency, count)
        if not (builds.delays or builds.blocks) or len(earlier_runs) + 1 == MOST_RUNS:
            break
        built = f"{len(builds.graphs)} graphs, {len(builds.kernels)} kernels, {builds.blocks} blocks"
        earlier_runs.append(f"run {len(earlier_runs) + 1}: {built}")
    compared = "no graph recorded and no kernel compiled while clients wait"
    check = Check(compared, float(len(builds.delays)), 0, ", ".join(builds.delays)[:200])
    note = f"{builds.blocks} blocks of memory obtained from the driver while clients wait"
    return WarmedRun(requests, check, "; ".join([note, *(f"not counted, {run}" for run in earlier_runs)]))
