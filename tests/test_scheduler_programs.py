"""Random programs against the scheduler: whatever happens around a request, it gives what it gives alone."""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specsim import SamplingParams, ServingConfig, SpecConfig
from specsim.differential.pairs import make_pair
from specsim.generation import load_engine
from specsim.invariance import BUDGETS, alone, difference, is_undecidable
from specsim.pairwise import pairwise
from specsim.phases import DraftInput
from specsim.requests import Request, make_request
from specsim.runner import Runner
from specsim.scheduler import Scheduler

VOCAB = 48
# Two conversations' beginnings; prompts share the first tokens of one of them.
FAMILIES = ([7 * i % 47 for i in range(24)], [11 * i % 43 + 3 for i in range(24)])
STYLES = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "narrow": {"temperature": 1.2, "top_k": 12, "top_p": 0.95, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "stopped": {"temperature": 1.0, "presence_penalty": 0.5, "stop_token_ids": (2, 9, 16, 23, 30)},
}
MOST_STEPS = 500  # to finish what a program leaves


@dataclass(frozen=True)
class Setting:
    """Where a program runs; graph None: on the reference."""

    kind: str
    config: SpecConfig
    serving: ServingConfig
    graph: str | None = None

    @property
    def impl(self) -> str:
        return "reference" if self.graph is None else "fast"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.graph is None else torch.float32


@cache
def pair_of(kind: str, dtype: torch.dtype):
    return make_pair(f"{kind}-llama", dtype)


@cache
def engine_of(kind: str, config: SpecConfig, dtype: torch.dtype, graph: str | None, bucket: int | None):
    impl = "reference" if graph is None else "fast"
    return load_engine(pair_of(kind, dtype), config, impl, dtype, graph=graph, bucket=bucket)


_ALONE: dict[tuple, object] = {}


def by_itself(setting: Setting, request: Request):
    """The request alone on the reference in float64, computed once."""
    key = (setting.kind, setting.config, setting.dtype, request.request_id, *request.prompt_ids, repr(request.params))
    if key not in _ALONE:
        _ALONE[key] = alone(pair_of(setting.kind, setting.dtype), setting.config, request)
    return _ALONE[key]


@st.composite
def prompts(draw) -> list[int]:
    family = draw(st.sampled_from(FAMILIES))
    return family[: draw(st.integers(0, len(family)))] + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))


ASKED = {
    "style": st.sampled_from(list(STYLES)),
    "seed": st.integers(0, 3),
    "priority": st.sampled_from([0, 0, 0, 1]),
    "keep": st.booleans(),
}


class Program(RuleBasedStateMachine):
    """What may happen to a scheduler, in any order; teardown lets everything end and compares."""

    requests = Bundle("requests")

    def __init__(self, settings: tuple[Setting, ...] = (), counts: Counter | None = None, most_tokens: int = 10):
        super().__init__()
        self.settings, self.counts = settings, Counter() if counts is None else counts
        self.most_tokens = most_tokens
        self.scheduler = None

    @initialize(setting=st.runner().flatmap(lambda state: st.sampled_from(state.settings)))
    def start(self, setting):
        self.setting, self.seen = setting, Counter()
        bucket = setting.serving.max_running if setting.graph else None
        engine = engine_of(setting.kind, setting.config, setting.dtype, setting.graph, bucket)
        with torch.inference_mode():
            self.scheduler = Scheduler(engine, setting.serving, audits=True)

    def submit(self, prompt, style, max_new_tokens, seed, priority, keep, wait, continues=None) -> int:
        request_id, scheduler = len(self.scheduler.requests), self.scheduler
        params = SamplingParams(**STYLES[style], max_new_tokens=max_new_tokens, seed=seed)
        target = pair_of(self.setting.kind, self.setting.dtype).target.config
        schedule = {"arrival": scheduler.step_index + wait, "priority": priority, "continues": continues}
        request = make_request(target, None, request_id, prompt, params, scheduler.max_len, **schedule)
        request.keep = keep
        scheduler.submit(request)
        return request_id

    @rule(
        target=requests,
        prompt=prompts(),
        max_new_tokens=st.runner().flatmap(lambda state: st.integers(1, state.most_tokens)),
        wait=st.sampled_from([0, 0, 0, 2]),
        **ASKED,
    )
    @precondition(lambda self: len(self.scheduler.requests) < 8)
    def arrive(self, **asked):
        self.seen["arrive"] += 1
        return self.submit(**asked)

    @rule(
        target=requests,
        request=requests,
        turn=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_new_tokens=st.runner().flatmap(lambda state: st.integers(1, state.most_tokens)),
        **ASKED,
    )
    @precondition(lambda self: len(self.scheduler.requests) < 8)
    def continue_session(self, request, turn, **asked):
        self.seen["continue_session"] += 1
        return self.submit(turn, continues=request, wait=0, **asked)

    @rule(steps=st.integers(1, 4))
    @precondition(lambda self: self.scheduler.is_busy)
    def round(self, steps):
        for _ in range(steps):
            self.seen["round"] += 1
            self.step()

    @rule(request=requests)
    def abort(self, request):
        is_live = self.scheduler.requests[request].finish_reason is None
        assert self.scheduler.abort(request) == is_live
        self.seen["abort"] += is_live

    @rule(eighths=st.integers(0, 7))
    def shrink(self, eighths):
        self.seen["shrink"] += 1
        self.scheduler.limit(self.scheduler.pools.num_slots * eighths // 8)

    @rule()
    @precondition(lambda self: self.scheduler.pools.usage()["withheld"])
    def grow(self):
        self.seen["grow"] += 1
        self.scheduler.limit(self.scheduler.pools.num_slots)

    @invariant()
    def audit(self):
        self.scheduler.pools.audit()

    def step(self):
        with torch.inference_mode():
            self.scheduler.step()

    def teardown(self):
        if self.scheduler is None or sys.exc_info()[0] is not None:  # the program did not come to its end
            return
        self.scheduler.limit(self.scheduler.pools.num_slots)
        for _ in range(MOST_STEPS):
            if not self.scheduler.is_busy:
                break
            self.step()
            assert not self.scheduler.is_stalled, "requests wait, nobody runs, and all slots are there"
        assert not self.scheduler.is_busy, f"not at its end after {MOST_STEPS} steps"
        usage = self.scheduler.close()
        assert usage["free"] == usage["slots"]
        assert usage["requests"] == 0
        for request in self.scheduler.requests.values():
            self.compare(request)
        self.counts.update(self.seen + exercised(self.scheduler) + Counter(programs=1))

    def compare(self, request: Request) -> None:
        assert (request.finish_reason == "rejected") == (request.error is not None)
        if request.finish_reason == "rejected" or not request.token_ids:
            assert not request.token_ids
            assert not request.accepted
            return
        output, setting = by_itself(self.setting, request), self.setting
        found = difference(request, output, BUDGETS[setting.dtype])
        if found and setting.graph and difference(request, output, math.inf):
            if is_undecidable(pair_of(setting.kind, setting.dtype), setting.config, request, setting.dtype):
                self.seen["undecidable"] += 1
                return
        assert found is None, found
        self.seen["compared"] += 1


def exercised(scheduler: Scheduler) -> Counter:
    """What one scheduler went through."""
    trace, requests, counts = scheduler.trace, scheduler.requests, Counter()
    num_steps = scheduler.runner._engine.config.num_steps
    counts.update({"requests": len(requests), "slots audited": scheduler.audited_slots})
    counts.update(f"finished by {request.finish_reason}" for request in requests.values())
    tree = scheduler.serving.prefix_cache
    for record in trace.records:
        counts["evicted pages"] += record.evicted_pages
        for each in record.retracted:
            counts["retracted"] += 1
            counts["retracted in a page"] += each.in_page
            counts["retracted in a chunk"] += each.in_chunk and each.seq_len > 0
        for request_id, columns in record.reused:
            kept = requests[request_id].continues is not None and not tree
            counts["turns on kept KV" if kept else "prefixes reused"] += 1
        counts["resumed"] += len(record.resumed)
        for result in record.results:
            if result.num_kept:
                counts[f"accepted {result.num_accepted_tokens - 1} of {num_steps}"] += 1
                counts["cut inside a path"] += result.num_kept < result.num_accepted_tokens
            else:
                counts["late results dropped"] += 1
    return counts


RULES = ("arrive", "continue_session", "round", "abort", "shrink", "grow")


def reference_settings(topk: int, schedule: str) -> tuple[Setting, ...]:
    """Every two choices of any two axes meet."""
    axes = {
        "num_steps": (1, 2, 3, 4),
        "page_size": (1, 2, 4, 16),
        "release": ("finish",) if schedule == "overlap" else ("finish", "round"),
        "extend": ("fixed", "ragged"),
        "draft_kv": ("lane", "ancestor"),
        "max_len": (34, 96),
        "kind": ("eagle", "eagle3"),
        "max_running": (1, 2, 3, 4),
        "room": (1.0, 1.3, 3.0),
        "chunk_tokens": (None, 3, 8),
        "prefix_cache": (False, True),
        "retraction": ("latest", "shortest", "longest"),
    }
    return tuple(setting_of(topk=topk, schedule=schedule, **cell) for cell in pairwise(axes))


def setting_of(kind, topk, num_steps, room, max_running, schedule, graph=None, **fields) -> Setting:
    """room: slots of the pool, in what a request of 40 tokens owns; the tree is as large as it can be, up to 8."""
    serving = {name: fields.pop(name) for name in ("chunk_tokens", "prefix_cache", "retraction")}
    nodes = num_steps + 1 if topk == 1 else min(8, topk + (num_steps - 1) * topk**2 + 1)
    config = SpecConfig(topk=topk, num_steps=num_steps, num_draft_tokens=nodes, **fields)
    slots = int(room * config.reserved_columns(min(40, config.max_len))) + config.page_size
    return Setting(kind, config, ServingConfig(schedule, max_running, slots, **serving), graph)


def fast_settings(graph: str, schedule: str) -> tuple[Setting, ...]:
    axes = {
        "topk": (2, 1, 3),
        "page_size": (4, 1, 16),
        "kind": ("eagle", "eagle3"),
        "extend": ("fixed", "ragged"),
        "draft_kv": ("lane", "ancestor"),
        "room": (1.3, 2.0),
        "max_running": (2, 1),
        "chunk_tokens": (None, 6),
        "prefix_cache": (True, False),
    }
    release = "round" if graph == "phase" and schedule == "sync" else "finish"
    fixed = {"num_steps": 2, "max_len": 48, "release": release, "retraction": "latest"}
    return tuple(setting_of(graph=graph, schedule=schedule, **fixed, **cell) for cell in pairwise(axes))


def run_programs(settings: tuple[Setting, ...], count: int, steps: int, most_tokens: int, seed: int = 0) -> Counter:
    """Run that many programs; repeatable under the tests' own hypothesis profile."""
    counts = Counter()
    factory = partial(Program, settings, counts, most_tokens)
    profile = hypothesis.settings()
    if profile.derandomize:
        factory._hypothesis_internal_use_seed = seed
    run_state_machine_as_test(
        factory,
        settings=hypothesis.settings(
            profile, max_examples=count, stateful_step_count=steps, suppress_health_check=list(HealthCheck)
        ),
    )
    return counts


def required(settings: tuple[Setting, ...]) -> dict[str, int]:
    lanes = {f"accepted {i} of {S}": 1 for S in {each.config.num_steps for each in settings} for i in range(S + 1)}
    late = {"late results dropped": 1} if settings[0].serving.schedule == "overlap" else {}
    return lanes | late


def check_counts(counts: Counter, least: dict[str, int]) -> None:
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    few = {name: (counts[name], number) for name, number in least.items() if counts[name] < number}
    assert not few, f"counted, required: {few}"


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_programs_on_the_reference(topk, schedule):
    settings = reference_settings(topk, schedule)
    counts = run_programs(settings, 50, steps=20, most_tokens=10)
    happened = ("retracted in a page", "retracted in a chunk", "turns on kept KV", "evicted pages", "cut inside a path")
    least = {"programs": 50} | dict.fromkeys(RULES, 40) | dict.fromkeys(happened, 1)
    check_counts(counts, least | required(settings))


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("graph", ["eager", "step", "phase", "round"])
def test_programs_on_fast(graph, schedule):
    settings = fast_settings(graph, schedule)
    counts = run_programs(settings, 5, steps=8, most_tokens=5)
    check_counts(counts, {"programs": 5} | dict.fromkeys(RULES, 1) | required(settings))
