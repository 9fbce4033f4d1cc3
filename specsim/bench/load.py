"""Loads of serving whose concurrency and acceptance change by phase, and runs of them under a policy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from specsim.bench.clock import wait, without_collection
from specsim.bench.row import Check, equal
from specsim.core.config import SamplingParams, ServingConfig
from specsim.core.engine import Engine
from specsim.core.policies.policy import Policy
from specsim.core.pool import KVPool
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.shapes import random_prompts
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a load: requests that run together, until the phase has the tokens of its rounds."""

    requests: int
    rates: tuple[float, ...]  # of synthetic acceptance, by position
    tokens: int  # after which the phase ends, of a request on average

    @property
    def all_tokens(self) -> int:
        return self.requests * self.tokens


Load = Sequence[Phase]


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Wall-clock time of the rounds of a phase."""

    seconds: float
    rounds: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Times and results of a load under a policy."""

    times: tuple[PhaseTime, ...]
    choices: tuple[int, ...]  # numbers of the settings of all rounds
    results: dict[str, torch.Tensor]  # of all requests, in order

    def us_per_token(self, load: Load) -> float:
        """Compute the time of a token, where each phase has its own number of them."""
        pairs = list(zip(self.times, load, strict=True))
        seconds = sum(phase_time.seconds / phase_time.tokens * phase.all_tokens for phase_time, phase in pairs)
        return 1e6 * seconds / sum(phase.all_tokens for _, phase in pairs)

    @property
    def switches(self) -> int:
        """Number of rounds with another setting than the one before."""
        return sum(before != now for before, now in pairwise(self.choices))


@dataclass(frozen=True, slots=True)
class LoadServer:
    """An engine with the pools of all its runs, so that every graph is captured once."""

    engine: Engine
    pools: KVPool
    serving: ServingConfig
    prompts: list[list[int]]  # of most requests that run together
    max_new_tokens: int  # more than a phase ever generates

    @classmethod
    def of(cls, engine: Engine, serving: ServingConfig, prompt_len: int, max_new_tokens: int) -> "LoadServer":
        """Make the pools of a setting of serving."""
        prompts = random_prompts(serving.max_running, prompt_len, engine.target.config.vocab_size)
        pools = engine.make_pools(2 * serving.max_running, serving.num_slots)
        return cls(engine, pools, serving, prompts, max_new_tokens)

    def run(self, load: Load, policy: Policy | None = None) -> LoadRun:
        """Serve the phases one after the other, each after the prefill of its requests, which is not timed."""
        scheduler = Scheduler(self.engine, self.serving, policy=policy, pools=self.pools)
        with torch.inference_mode():
            times = tuple(self._phase(scheduler, number, phase) for number, phase in enumerate(load))
            scheduler.close()
        return LoadRun(times, scheduler.choices, _results(list(scheduler.requests.values())))

    def _phase(self, scheduler: Scheduler, number: int, phase: Phase) -> PhaseTime:
        self._accept(phase.rates)
        requests = [
            self._request(number * len(self.prompts) + index, prompt, scheduler.step_index)
            for index, prompt in enumerate(self.prompts[: phase.requests])
        ]
        for request in requests:
            scheduler.submit(request)
        scheduler.step()  # the prompts, and under `overlap` a round that stands for the one still unread at the end
        wait()
        tokens = rounds = 0
        with without_collection():
            start = time.perf_counter()
            while tokens < phase.all_tokens:
                tokens += sum(result.num_accepted_tokens for result in scheduler.step().results)
                rounds += 1
            wait()
            seconds = time.perf_counter() - start
        for request in requests:
            scheduler.abort(request.request_id)
        return PhaseTime(seconds, rounds, tokens)

    def _request(self, request_id: int, prompt: list[int], step: int) -> Request:
        params = SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=True)
        return make_request(self.engine.target.config, None, request_id, prompt, params, arrival=step)

    def _accept(self, rates: tuple[float, ...]) -> None:
        """Write the rates where the graphs of all settings read them."""
        engine: Any = self.engine
        for setting_engine in getattr(engine, "_engines", [engine]):  # only the fast engine has schedules
            cut = SyntheticAcceptance(rates).cut(setting_engine.config.num_steps)
            if cut is not None:
                setting_engine._schedule.shares.copy_(torch.tensor(cut.shares))


def _results(requests: Sequence[Request]) -> dict[str, torch.Tensor]:
    logprobs = [logprob for request in requests for logprob in request.logprobs]
    return {
        "tokens": torch.tensor([token for request in requests for token in request.token_ids]),
        "logprobs": torch.tensor(logprobs, dtype=torch.float64),
        "accepted tokens of every round": torch.tensor([count for request in requests for count in request.accepted]),
        "setting of every round": torch.tensor([number for request in requests for number in request.settings]),
    }


def check_results(compared: str, served: LoadRun, expected: LoadRun) -> Check:
    """Compare all results of two runs bit for bit."""
    return equal(compared, served.results, expected.results)
