"""Random programs against the scheduler: whatever happens around a request, it gives what it gives alone."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial, wraps
from itertools import product

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specsim.core.columns import round_columns
from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import DraftInput
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.invariance.solo import alone, judge
from specsim.correctness.pairwise import pairwise
from specsim.correctness.soak.coverage import accepted_name, exercised
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.residents import Residents
from specsim.serving.scheduler import Scheduler

VOCAB = 48
# Prompts share the first tokens of one of these.
FAMILIES = ([7 * i % 47 for i in range(24)], [11 * i % 43 + 3 for i in range(24)])
STYLES = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "narrow": {"temperature": 1.2, "top_k": 12, "top_p": 0.95, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "stopped": {"temperature": 1.0, "presence_penalty": 0.5, "stop_token_ids": (2, 9, 16, 23, 30)},
}
MOST_STEPS = 500  # to finish what a program leaves


@dataclass(frozen=True, repr=False)
class Setting:
    """Where a program runs; graph None: on the reference."""

    pair: str
    config: SpecConfig
    serving: ServingConfig
    graph: str | None = None

    def __repr__(self) -> str:
        graph = f", {self.graph!r}" if self.graph else ""
        return f"Setting({self.pair!r}, {_code(self.config)}, {_code(self.serving)}{graph})"

    def _repr_pretty_(self, printer, is_cycle) -> None:
        printer.text(repr(self))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.graph is None else torch.float32


def _code(value) -> str:
    """A dataclass as it would be written: what is not left out."""
    parts = {each.name: getattr(value, each.name) for each in fields(value)}
    named = [f"{each.name}={parts[each.name]!r}" for each in fields(value) if parts[each.name] != each.default]
    return f"{type(value).__name__}({', '.join(named)})"


@cache
def pair_of(name: str, dtype: torch.dtype):
    return make_pair(name, dtype)


@cache
def engine_of(name: str, config: SpecConfig, dtype: torch.dtype, graph: str | None, bucket: int | None):
    impl = "reference" if graph is None else "fast"
    return load_engine(pair_of(name, dtype), config, EngineOptions(impl, dtype, graph=graph, bucket=bucket))


_ALONE: dict[tuple, object] = {}


def by_itself(setting: Setting, request: Request):
    """The request alone on the reference in float64, computed once."""
    key = (setting.pair, setting.config, setting.dtype, request.request_id, *request.prompt_ids, repr(request.params))
    if key not in _ALONE:
        _ALONE[key] = alone(pair_of(setting.pair, setting.dtype), setting.config, request)
    return _ALONE[key]


TURN = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
ASKED = {
    "max_new_tokens": st.runner().flatmap(
        lambda state: st.sampled_from([n for n in (1, 2, 3, 4, 5, 8, 10) if n <= state.most_tokens])
    ),
    "style": st.sampled_from(list(STYLES)),
    "seed": st.integers(0, 3),
    "priority": st.sampled_from([0, 0, 0, 1]),
    "keep": st.booleans(),
}


def served(act):
    """A rule as a server runs it, and the audit after it."""

    @wraps(act)
    def run(self, **arguments):
        with torch.inference_mode():
            result = act(self, **arguments)
            self.scheduler.pools.audit()
        return result

    return run


class Serving(RuleBasedStateMachine):
    """What may happen to a scheduler, in any order; teardown lets everything end and compares."""

    requests = Bundle("requests")

    def __init__(self, settings: tuple[Setting, ...] = (), counts: Counter | None = None, most_tokens: int = 10):
        super().__init__()
        self.settings, self.counts = settings, Counter() if counts is None else counts
        self.most_tokens = most_tokens
        self.scheduler = None

    @initialize(setting=st.runner().flatmap(lambda state: st.sampled_from(state.settings)))
    @served
    def start(self, setting):
        self.setting, self.seen = setting, Counter()
        bucket = setting.serving.max_running if setting.graph else None
        engine = engine_of(setting.pair, setting.config, setting.dtype, setting.graph, bucket)
        self.scheduler = Scheduler(engine, setting.serving, audits=True)

    @property
    def residents(self) -> list[Request]:
        """Who has a place now."""
        return [each for each in self.scheduler.requests.values() if each.row >= 0 and not each.finish_reason]

    def submit(self, prompt, style, max_new_tokens, seed, priority, keep, wait, continues=None) -> int:
        request_id, scheduler = len(self.scheduler.requests), self.scheduler
        params = SamplingParams(**STYLES[style], max_new_tokens=max_new_tokens, seed=seed)
        target = pair_of(self.setting.pair, self.setting.dtype).target.config
        schedule = {"arrival": scheduler.step_index + wait, "priority": priority, "continues": continues, "keep": keep}
        request = make_request(target, None, request_id, prompt, params, **schedule)
        scheduler.submit(request)
        return request_id

    @rule(
        target=requests,
        family=st.sampled_from(range(len(FAMILIES))),
        shared=st.integers(0, len(FAMILIES[0])),
        own=TURN,
        wait=st.sampled_from([0, 0, 0, 2]),
        **ASKED,
    )
    @precondition(lambda self: len(self.scheduler.requests) < 8)
    @served
    def arrive(self, family, shared, own, **asked):
        self.seen["arrive"] += 1
        return self.submit(FAMILIES[family][:shared] + own, **asked)

    @rule(
        target=requests,
        request=requests,
        turn=TURN,
        **ASKED,
    )
    @precondition(lambda self: len(self.scheduler.requests) < 8)
    @served
    def continue_session(self, request, turn, **asked):
        self.seen["continue_session"] += 1
        return self.submit(turn, continues=request, wait=0, **asked)

    @rule()
    @served
    def round(self):
        self.seen["round"] += 1
        self.scheduler.step()

    @rule(count=st.integers(2, 6))
    @precondition(lambda self: self.scheduler.is_busy)
    @served
    def rounds(self, count):
        self.seen["round"] += count
        for _ in range(count):
            self.scheduler.step()

    @rule(request=requests)
    @precondition(lambda self: self.residents)
    @served
    def abort(self, request):
        is_live = self.scheduler.requests[request].finish_reason is None
        assert self.scheduler.abort(request) == is_live
        self.seen["abort"] += is_live

    @rule(eighths=st.integers(0, 7))
    @precondition(lambda self: self.residents and not self.scheduler.pools.usage()["withheld"])
    @served
    def shrink(self, eighths):
        self.seen["shrink"] += 1
        self.scheduler.limit(self.scheduler.pools.num_slots * eighths // 8)

    @rule()
    @precondition(lambda self: self.scheduler.pools.usage()["withheld"])
    @served
    def grow(self):
        self.seen["grow"] += 1
        self.scheduler.limit(self.scheduler.pools.num_slots)

    @torch.inference_mode()
    def teardown(self):
        if self.scheduler is None or sys.exc_info()[0] is not None:  # the program did not come to its end
            return
        self.scheduler.limit(self.scheduler.pools.num_slots)
        for _ in range(MOST_STEPS):
            if not self.scheduler.is_busy:
                break
            self.scheduler.step()
            assert not self.scheduler.is_stalled, "requests wait, nobody runs, and all slots are there"
        assert not self.scheduler.is_busy, f"not at its end after {MOST_STEPS} steps"
        usage = self.scheduler.close()
        assert usage["free"] == usage["slots"]
        assert usage["requests"] == 0
        for request in self.scheduler.requests.values():
            self.compare(request)
        self.counts.update(self.seen + self.happened() + Counter(programs=1))

    def happened(self) -> Counter[str]:
        counts, num_steps = exercised(self.scheduler), self.setting.config.num_steps
        for count in range(num_steps + 1):
            counts[accepted_name(count, num_steps)] = counts.pop(f"accepted drafts {count}", 0)
        return counts

    def compare(self, request: Request) -> None:
        assert (request.finish_reason == "rejected") == (request.error is not None)
        if not request.token_ids:
            assert request.finish_reason in ("abort", "rejected")
            assert not request.accepted
            return
        assert request.finish_reason != "rejected"
        output, setting = by_itself(self.setting, request), self.setting
        judgement = judge(pair_of(setting.pair, setting.dtype), setting.config, request, output, setting.dtype)
        assert judgement.verdict != "different", judgement.difference
        self.seen["undecidable" if judgement.verdict == "undecidable" else "compared"] += 1


# Seeds under which the programs go through all that is required.
SEEDS = {
    (1, "sync"): 200,
    (1, "overlap"): 300,
    (2, "sync"): 300,
    (2, "overlap"): 200,
    (3, "sync"): 200,
    (3, "overlap"): 400,
}


def reference_settings(topk: int, schedule: str, num_steps: int) -> tuple[Setting, ...]:
    """Every two choices of any two axes meet."""
    axes = {
        "page_size": (1, 2, 4, 16),
        "release": ("finish",) if schedule == "overlap" else ("finish", "round"),
        "extend": ("fixed", "ragged"),
        "draft_kv": ("lane", "ancestor"),
        "max_len": (34, 96),
        "pair": ("eagle-llama", "eagle3-noisy", "eagle-noisy", "eagle3-llama"),
        "max_running": (4, 3, 2, 1),
        "room": (1.0, 1.3, 3.0),
        "chunk_tokens": (None, 3, 8),
        "prefix_cache": (False, True),
        "preemption": ("latest", "shortest", "longest"),
    }
    fixed = {"topk": topk, "schedule": schedule, "num_steps": num_steps}
    return tuple(setting_of(**fixed, **cell) for cell in pairwise(axes))


def fast_settings(graph: str, schedule: str) -> tuple[Setting, ...]:
    axes = {
        "topk": (2, 1, 3),
        "page_size": (4, 1, 16),
        "pair": ("eagle-llama", "eagle3-llama"),
        "extend": ("fixed", "ragged"),
        "draft_kv": ("lane", "ancestor"),
        "room": (1.3, 2.0),
        "max_running": (2, 1),
        "chunk_tokens": (None, 6),
        "prefix_cache": (True, False),
    }
    release = "round" if (graph, schedule) in (("phase", "sync"), ("step", "sync")) else "finish"
    fixed = {"num_steps": 2, "max_len": 48, "release": release, "preemption": "latest"}
    return tuple(setting_of(graph=graph, schedule=schedule, **fixed, **cell) for cell in pairwise(axes))


def setting_of(pair, topk, num_steps, room, max_running, schedule, graph=None, **fields) -> Setting:
    """room: slots of the pool, in what a request of 40 tokens owns; the tree is as large as it can be, up to 8."""
    serving = {name: fields.pop(name) for name in ("chunk_tokens", "prefix_cache", "preemption")}
    nodes = num_steps + 1 if topk == 1 else min(8, topk + (num_steps - 1) * topk**2 + 1)
    config = SpecConfig(topk=topk, num_steps=num_steps, num_draft_tokens=nodes, **fields)
    slots = int(room * round_columns(min(40, config.max_len), config)) + config.page_size
    return Setting(pair, config, ServingConfig(schedule, max_running, slots, **serving), graph)


def run_programs(settings: tuple[Setting, ...], count: int, steps: int, most_tokens: int, seed: int = 0) -> Counter:
    """Run that many programs, the same in every run under the tests' own hypothesis profile."""
    counts, profile = Counter(), hypothesis.settings()
    machine = partial(Serving, settings, counts, most_tokens)
    if profile.derandomize:  # by a number, so that a change in the machine's source is no change of the programs
        machine = hypothesis.seed(seed)(machine)
    checks = list(HealthCheck)
    limits = hypothesis.settings(
        profile,
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=checks,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=limits)
    return counts


def slicing_filter(self, requests):
    return replace(self, **{each.name: _first(getattr(self, each.name), len(requests)) for each in fields(self)})


def _first(value, count: int):
    return value if value is None else value[:count]


def share_and_record_nothing(self, request):
    row = self._pools.open()
    if self._tree is not None:
        self._pools.share(row, self._tree.match(request.known_ids, request.prefill_len - 1))
    return row


CHAIN = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3, page_size=1, max_len=34)
FAULTS = {
    "a filter that slices": (DraftInput, "filter", slicing_filter, ServingConfig(num_slots=200)),
    "shared pages whose tokens are not recorded": (
        Residents,
        "_open",
        share_and_record_nothing,
        ServingConfig(num_slots=200, prefix_cache=True),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_program_shrinks_to_a_handful_of_steps_and_prints_as_code(fault, monkeypatch):
    owner, name, wrong, serving = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    settings = (Setting("eagle-llama", CHAIN, serving),)
    with pytest.raises(AssertionError, match=r"request \d+: ") as caught:
        run_programs(settings, 200, steps=10, most_tokens=5, seed=1)
    printed = "\n".join(caught.value.__notes__)
    code = [line for line in printed.splitlines() if line.startswith(("state", "requests_"))]
    print("\n".join(code))
    assert code[0] == "state = Serving()"
    assert code[1] == f"state.start(setting={settings[0]!r})"
    assert code[-1] == "state.teardown()"
    assert 4 <= len(code) <= 10
    assert any("state.arrive(" in line for line in code)
    with pytest.raises(AssertionError, match=re.escape(str(caught.value))):
        exec("\n".join(code), globals().copy())
    monkeypatch.undo()
    exec("\n".join(code), globals().copy())


def check_counts(counts: Counter, least: dict[str, int]) -> None:
    """Other programs than those of the tests' own profile may miss something by chance."""
    print("\n" + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    few = {name: counts[name] for name, number in least.items() if counts[name] < number}
    assert not few or not hypothesis.settings().derandomize, f"too few: {few} of {least}"


def accepted(settings: tuple[Setting, ...]) -> list[str]:
    depths = {each.config.num_steps for each in settings}
    return [accepted_name(count, depth) for depth in sorted(depths) for count in range(depth + 1)]


# Of the first 100 those under which six programs go through all that is required; rounds are slow without a GPU.
FAST_SEEDS = {
    ("eager", "sync"): 25,
    ("eager", "overlap"): 34,
    ("step", "sync"): 27,
    ("step", "overlap"): 48,
    ("phase", "sync"): 25,
    ("phase", "overlap"): 27,
    ("round", "sync"): 89,
    ("round", "overlap"): 12,
}
RULES = ("arrive", "continue_session", "round", "abort", "shrink", "grow")
HAPPENED = (
    "aborted with tokens",
    "finished stop",
    "finished length",
    "preempted in a page",
    "preempted in a chunk",
    "resumed",
    "turns on kept KV",
    "turns preempted",
    "shared pages",
    "evicted pages",
    "prefill chunks",
    "cut inside a path",
    "batches emptied",
)
LATE = ("late results dropped", "preempted with a result unread")


def by_default(names: str, chosen: set[tuple], *values: Sequence):
    """Of all combinations those that are chosen; the others with --whole."""
    marks = {each: () if each in chosen else pytest.mark.whole for each in product(*values)}
    return pytest.mark.parametrize(names, [pytest.param(*each, marks=mark) for each, mark in marks.items()])


@by_default("topk, schedule", {(2, "overlap")}, (1, 2, 3), ("sync", "overlap"))
def test_programs_on_the_reference(topk, schedule):
    counts, least = Counter(), {"programs": 280} | dict.fromkeys(RULES, 10) | dict.fromkeys(HAPPENED, 1)
    if schedule == "overlap":
        least |= dict.fromkeys(LATE, 1)
    for num_steps in (1, 2, 3, 4):
        settings = reference_settings(topk, schedule, num_steps)
        counts += run_programs(
            settings, 20 + 20 * num_steps, steps=24, most_tokens=10, seed=SEEDS[topk, schedule] + 10 * topk + num_steps
        )
        least |= dict.fromkeys(accepted(settings), 1)
    check_counts(counts, least)


@by_default(
    "graph, schedule",
    {("phase", "sync"), ("round", "overlap")},
    ("eager", "step", "phase", "round"),
    ("sync", "overlap"),
)
def test_programs_on_fast(graph, schedule):
    settings = fast_settings(graph, schedule)
    counts = run_programs(settings, 6, steps=12, most_tokens=5, seed=FAST_SEEDS[graph, schedule])
    least = {"programs": 6} | dict.fromkeys((*RULES, *accepted(settings)), 1)
    check_counts(counts, least)
