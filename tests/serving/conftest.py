"""The engine, pair and requests of the scheduler's tests."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from time import perf_counter
from typing import Any

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.invariance.solo import BUDGETS, difference, run_solo
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

from .settings import LONG, OTHER, SHORT, TREE


class AuditedScheduler(Scheduler):
    """A scheduler whose pool is audited after every step."""

    def submit(self, *requests: Request) -> None:
        for request in requests:
            super().submit(request)

    def serve(self, *requests: Request) -> "AuditedScheduler":
        self.submit(*requests)
        self.run()
        self.close()
        return self

    def events(self, name: str) -> list:
        return [each for record in self.trace.records for each in getattr(record, name)]


@cache
def noisy_pair() -> Pair:
    return make_pair("eagle-noisy")


@cache
def reference_engine(config: SpecConfig = TREE) -> Engine:
    return load_engine(noisy_pair(), config, EngineOptions("reference", torch.float64))


@pytest.fixture(scope="module")
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def pair() -> Pair:
    return noisy_pair()


@pytest.fixture(scope="session")
def make() -> Callable[..., AuditedScheduler]:
    """Make schedulers from the fields of their ServingConfig."""

    def make(config: SpecConfig = TREE, engine=None, num_slots=1000, clock=perf_counter, **serving) -> Scheduler:
        engine = engine or reference_engine(config)
        return AuditedScheduler(engine, ServingConfig(num_slots=num_slots, **serving), audits=True, clock=clock)

    return make


@pytest.fixture(scope="session")
def ask() -> Callable[..., Request]:
    """Make requests from their sampling parameters."""

    def ask(request_id: int, prompt=SHORT, max_new_tokens: int = 8, pair=None, schedule=None, **params: Any) -> Request:
        pair = pair or noisy_pair()
        params = SamplingParams(max_new_tokens=max_new_tokens, **params)
        return make_request(pair.target.config, pair.tokenizer, request_id, prompt, params, **(schedule or {}))

    return ask


@pytest.fixture(scope="session")
def check_solo() -> Callable[..., None]:
    """Compare requests' tokens with their solo runs."""

    def check(requests: Iterable[Request], config: SpecConfig = TREE, pair: Pair | None = None) -> None:
        for request in requests:
            output = run_solo(pair or noisy_pair(), config, request)
            assert difference(request, output, BUDGETS[torch.float64]) is None

    return check


@pytest.fixture
def three_running(make, ask) -> Callable[..., AuditedScheduler]:
    """Make a scheduler whose requests 0, 1 and 2 arrived in this order and decode.

    0 is the longest, 1 the shortest.
    """

    def start(priorities=(0, 0, 0), **serving: Any) -> AuditedScheduler:
        scheduler = make(**serving)
        for request_id, prompt in enumerate((LONG, SHORT, OTHER)):
            schedule = {"arrival": request_id, "priority": priorities[request_id]}
            scheduler.submit(ask(request_id, prompt, 14, schedule=schedule, temperature=1.0))
        for _ in range(4):
            scheduler.step()
        assert not any(request.finish_reason for request in scheduler.requests.values())
        return scheduler

    return start
