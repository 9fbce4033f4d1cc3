"""Adaptive policies against fixed settings: constant loads, and one that changes."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from specsim.bench.clock import timing
from specsim.bench.load import Load, LoadRun, LoadServer, Phase, check_results
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of
from specsim.bench.scene import stacked
from specsim.bench.shipped_pair import same_tokens
from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.policies.goodput import CostTable
from specsim.core.policies.named import NamedPolicy, named_policy
from specsim.core.policies.policy import Always, Scripted
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.load import load
from specsim.models.shapes import random_pair
from specsim.models.shipped import load_prompts
from specsim.serving.adaptation import settings_of
from specsim.serving.generation import generate, load_adaptive_engine, load_engine

STEPS = (0, 2, 7)
CHAIN = SpecConfig(topk=1, num_steps=7, max_len=1024)
PROMPT_LEN = 64
SAMPLES = 3
MOST_LOSS = 0.02  # of tokens a second, against the best fixed setting
SHIPPED = ("moving-average", "throughput", {"policy": "scripted", "script": [2, 0, 7, 2, 0, 0, 7]})
SHIPPED_TOKENS = 32


def _rates(share: float) -> tuple[float, ...]:
    """Rates of drafts that are accepted with equal probability after an accepted one."""
    return tuple(share**position for position in range(1, CHAIN.num_steps + 1))


STEADY, EASY, HARD = _rates(0.75), _rates(0.9), _rates(0.3)
CONSTANT = (Phase(1, STEADY, 200), Phase(16, STEADY, 240), Phase(64, STEADY, 96))
CHANGING = (Phase(1, EASY, 120), Phase(64, HARD, 40), Phase(16, STEADY, 72))
MEASURED = (1, 16, 64)  # batch sizes of the measured costs, those of the loads
MEASURED_TOKENS = 24
CHECKED_TOKENS = 24  # of the fixed settings


def shipped_rows(quick: bool, device: str = "cuda") -> Iterator[BenchRow]:
    """Compare greedy tokens of policies with those of plain decoding, for the shipped pair in float32; no times."""
    texts = [prompt["text"] for prompt in load_prompts()][: 1 if quick else 4]
    run = partial(_generate, load(), texts, EngineOptions("fast", torch.float32, device, bucket=len(texts)))
    plain = run(None)
    for policy in SHIPPED:
        generation = run(policy)
        name = policy if isinstance(policy, str) else policy["policy"]
        check = same_tokens("tokens of plain decoding", generation, plain)
        setting = {"policy": name, "requests": len(texts), "dtype": "float32"}
        notes = (f"{generation.switching.switches} switches, accept length {generation.metrics['accept_length']:.2f}",)
        yield BenchRow("shipped pair, adaptive", setting, {OURS: check}, notes=notes)


def _generate(pair: Pair, texts: Sequence[str], options: EngineOptions, policy: Any) -> Any:
    params = SamplingParams(max_new_tokens=SHIPPED_TOKENS)
    config = SpecConfig.plain() if policy is None else SpecConfig(topk=1, num_steps=max(STEPS))
    pair = replace(pair, drafter=None) if policy is None else pair
    if isinstance(policy, str):
        policy = {"policy": policy, "steps": list(STEPS)}
    return generate(pair, texts, config, params, engine=options, adaptive=policy)


def load_rows(shape: str, quick: bool) -> Iterator[BenchRow]:
    """Time constant loads and a changing one, under policies and fixed settings, after their equality checks."""
    pair = stacked(random_pair(shape, "cuda", torch.bfloat16))
    options = EngineOptions("fast", torch.bfloat16, "cuda", "round")
    loads = {"constant": CONSTANT[:1]} if quick else {"constant": CONSTANT, "changing": CHANGING}
    bench = AdaptiveBench.of(pair, options, MEASURED[:1] if quick else MEASURED)
    for phase in loads["constant"]:
        yield bench.row("constant load", (phase,), 1 / (1 - MOST_LOSS))
    if not quick:
        yield bench.row("changing load", loads["changing"], 1.0)


@dataclass(frozen=True, slots=True)
class AdaptiveBench:
    """An engine of all settings, the policies to time, and the check of its fixed settings."""

    server: LoadServer
    policies: Mapping[str, NamedPolicy]  # by contender
    fixed_check: Check
    notes: tuple[str, ...]

    @classmethod
    def of(cls, pair: Pair, options: EngineOptions, sizes: Sequence[int]) -> "AdaptiveBench":
        """Capture every setting at these batch sizes, measure its rounds, and make the policies from that."""
        settings = Settings.of_steps(CHAIN, STEPS)
        engine = load_adaptive_engine(pair, settings, options, acceptance=SyntheticAcceptance(STEADY))
        server = LoadServer.of(engine, _serving(max(sizes)), PROMPT_LEN, CHAIN.length_limit - PROMPT_LEN - 1)
        start = time.perf_counter()
        for number in range(len(STEPS)):
            for size in sizes:
                server.run([Phase(size, STEADY, 2)], Always(number))
        captured = time.perf_counter() - start
        check = _check_fixed(pair, options, server)
        seconds = _measured(server, sizes)
        return cls(
            server, _policies(seconds, sizes), check, (_capture_note(captured, sizes), *_cost_notes(seconds, sizes))
        )

    def row(self, name: str, load: Load, limit: float) -> BenchRow:
        """Check and time a load under all policies and fixed settings, in turns."""
        makers: dict[str, Callable[[], Any]] = {name: policy.make for name, policy in self.policies.items()}
        makers |= {f"steps {steps}": partial(Always, number) for number, steps in enumerate(STEPS)}
        checks = dict.fromkeys(makers, self.fixed_check)
        first: dict[str, LoadRun] = {}
        for policy in self.policies:
            first[policy] = self.server.run(load, makers[policy]())
            scripted = self.server.run(load, Scripted(first[policy].choices))
            checks[policy] = check_results("a scripted run of the same settings, bit for bit", first[policy], scripted)
        passed = [name for name in makers if checks[name].passed]
        times = self._time_load(load, {name: makers[name] for name in passed}, first)
        setting = {
            "requests": " → ".join(f"{phase.requests}" for phase in load),
            "acceptance of a draft": " → ".join(f"{phase.rates[0]:g}" for phase in load),
        }
        notes = (*self.notes, *(_choices_note(policy, served) for policy, served in first.items()))
        return BenchRow(name, setting, checks, times, targets=_targets(times, limit), notes=notes)

    def _time_load(
        self, load: Load, makers: Mapping[str, Callable[[], Any]], first: Mapping[str, LoadRun]
    ) -> dict[str, Timing]:
        """Time a load SAMPLES times under each policy, one after the other; first: runs that count as a sample."""
        samples_by_name = {name: [first[name].us_per_token(load)] if name in first else [] for name in makers}
        for sample in range(SAMPLES):
            for name, make in makers.items():
                if len(samples_by_name[name]) <= sample:
                    samples_by_name[name].append(self.server.run(load, make()).us_per_token(load))
        return {name: timing(samples) for name, samples in samples_by_name.items()}


def _serving(requests: int) -> ServingConfig:
    room = CHAIN.length_limit + 2 * CHAIN.page_size
    return ServingConfig("overlap", max_running=requests, num_slots=requests * room)


def _check_fixed(pair: Pair, options: EngineOptions, server: LoadServer) -> Check:
    """Compare every fixed setting with an engine of that setting alone, eager, at one request."""
    load = [Phase(1, STEADY, CHECKED_TOKENS)]
    checks = []
    for number, steps in enumerate(STEPS):
        config = settings_of(server.engine)[number]
        acceptance = SyntheticAcceptance(STEADY).cut(steps)
        alone = load_engine(pair, config, replace(options, graph="eager"), acceptance=acceptance)
        one = LoadServer.of(alone, _serving(1), PROMPT_LEN, server.max_new_tokens)
        served, expected = server.run(load, Always(number)), one.run(load)
        expected.results["setting of every round"].fill_(number)
        checks.append(check_results(f"an engine of {steps} steps alone, bit for bit", served, expected))
    return all_of("engines of each setting alone, eager, bit for bit", *checks)


def _measured(server: LoadServer, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Measure the seconds of a round, by num_steps, at every batch size."""
    seconds: dict[int, list[float]] = {}
    for number, steps in enumerate(STEPS):
        seconds[steps] = []
        for size in sizes:
            runs = [server.run([Phase(size, STEADY, MEASURED_TOKENS)], Always(number)).times[0] for _ in range(SAMPLES)]
            seconds[steps].append(statistics.median(run.seconds / run.rounds for run in runs))
    return seconds


def _policies(seconds: Mapping[int, Sequence[float]], sizes: Sequence[int]) -> dict[str, NamedPolicy]:
    """Make the policies; goodput has the measured costs, the table the best steps at the steady acceptance."""
    cost = CostTable(sizes, seconds)
    expected = 1 + np.concatenate([[0.0], np.cumsum(STEADY)])
    lows = [1, *(size + 1 for size in sizes[:-1])]
    best = [max(STEPS, key=lambda steps: expected[steps] / cost.round(np.empty(size), _with(steps))) for size in sizes]
    entries = [list(entry) for entry in zip(lows, sizes, best, strict=True)]
    profile = {"batch_sizes": list(sizes), "seconds": {str(steps): list(values) for steps, values in seconds.items()}}
    policy_fields: dict[str, dict[str, Any]] = {
        OURS: {"policy": "goodput", **profile},
        f"{OURS}, moving average": {"policy": "moving-average"},
        f"{OURS}, table": {"policy": "table", "num_speculative_tokens_per_batch_size": entries},
    }
    return {name: named_policy(value | {"steps": list(STEPS)}, CHAIN) for name, value in policy_fields.items()}


def _with(steps: int) -> SpecConfig:
    return Settings.of_steps(CHAIN, (steps,))[0]


def _targets(times: Mapping[str, Timing], limit: float) -> tuple[PerformanceTarget, ...]:
    """Set the target of the policy with measured costs against the best fixed setting."""
    fixed = [fixed_time.median_us for name, fixed_time in times.items() if not name.startswith(OURS)]
    if OURS not in times or len(fixed) < len(STEPS):
        return ()
    return (PerformanceTarget("time / best fixed setting", times[OURS].median_us / min(fixed), limit),)


def _capture_note(seconds: float, sizes: Sequence[int]) -> str:
    count = len(STEPS) * len(sizes)
    memory = torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return f"{count} graphs captured in {seconds:.1f} s; {memory:.1f} GiB of memory in all"


def _cost_notes(seconds: Mapping[int, Sequence[float]], sizes: Sequence[int]) -> Iterator[str]:
    for steps, values in seconds.items():
        yield f"{steps} steps: " + ", ".join(
            f"{1e6 * value:,.0f} us at {size}" for value, size in zip(values, sizes, strict=True)
        )


def _choices_note(policy: str, served: LoadRun) -> str:
    counts = ", ".join(f"{served.choices.count(number)} of {steps}" for number, steps in enumerate(STEPS))
    return f"{policy}: rounds by steps {counts}; {served.switches} switches"
