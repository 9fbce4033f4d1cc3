"""The simulator's event loop: its time on one core of the CPU, after checks of its steps."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from specsim.bench.clock import timing
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing
from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine import Engine
from specsim.core.policies.policy import AnyPolicy
from specsim.serving.adaptation import settings_of
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import StepRecord
from specsim.simulator import CostModel, hardware, model
from specsim.simulator.acceptance import Option, RecordedAcceptance
from specsim.simulator.results import SimulatedRun
from specsim.simulator.server import simulate
from specsim.simulator.workload import SimulatedWorkload, closed_loop, poisson

MODEL = "llama-3-8b"
GPU = "H100-SXM"
REQUESTS = 10_000
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
RATES = (40, 10, 4)  # requests a second: a saturated server, a busy one, one of small batches and many steps
MOST_SECONDS = 4.0  # of a core
SAMPLES = 5
LOOP = ServingConfig("overlap", 256, 2**31 - 1, 8192)
PAIR = "eagle-noisy"  # small, as only its steps count
SCHEDULER = {
    "sync": ServingConfig("sync", 5, 148, chunk_tokens=11, preemption="longest"),
    "overlap": ServingConfig("overlap", 5, 148, chunk_tokens=11, preemption="shortest"),
}


def loop_rows(is_quick: bool) -> Iterator[BenchRow]:
    """Time a workload without speculation, by rate of arrivals."""
    for rate in RATES[:1] if is_quick else RATES:
        workload = poisson(REQUESTS, rate, PROMPT_TOKENS, OUTPUT_TOKENS)
        setting = {"model": MODEL, "requests": REQUESTS, "rate": rate, "tokens": f"{PROMPT_TOKENS} + {OUTPUT_TOKENS}"}
        run = simulate(CostModel(*COST), Option.plain(), workload, LOOP)
        check = _equal(simulate(ForgetfulCost(*COST), Option.plain(), workload, LOOP), run)
        if not check.passed:
            yield BenchRow("event loop", setting, {OURS: check})
            continue
        times = timing([_seconds(workload) * 1e6 for _ in range(SAMPLES)])
        yield BenchRow(
            "event loop",
            setting,
            {OURS: check},
            {OURS: times},
            targets=(PerformanceTarget("seconds of a core", times.median_us / 1e6, MOST_SECONDS),),
            notes=_notes(run, times),
        )


class ForgetfulCost(CostModel):
    """A cost model of whose rounds the simulated server remembers nothing."""


COST = (hardware(GPU), model(MODEL))


def _seconds(workload: SimulatedWorkload) -> float:
    """Measure the CPU time of a run, with its results' arrays and quantiles."""
    before = time.process_time()
    simulate(CostModel(*COST), Option.plain(), workload, LOOP)
    return time.process_time() - before


def _notes(run: SimulatedRun, times: Timing) -> tuple[str, ...]:
    mean = run.rounds.sum() / run.num_steps
    return (f"{run.num_steps:,} steps of {mean:.1f} requests, {times.median_us / run.num_steps:.2f} us a step",)


def _equal(forgetful: SimulatedRun, run: SimulatedRun) -> Check:
    """Compare all results of requests, and all figures, with and without remembered rounds."""
    names = ("arrivals", "firsts", "lasts", "first_steps", "last_steps", "rounds", "drafts", "preemptions")
    wrong = [name for name in names if getattr(forgetful, name).tobytes() != getattr(run, name).tobytes()]
    figures = zip(forgetful.metrics().items(), run.metrics().values(), strict=True)
    wrong += [name for (name, mine), its in figures if not np.array_equal(mine, its, equal_nan=True)]
    compared = "requests and figures without remembered rounds, bit for bit"
    return Check(compared, float(len(wrong)), 0, f"{wrong[0]} differs" if wrong else "")


def scheduler_rows() -> Iterator[BenchRow]:
    """Compare steps, preemptions and ends with those of the scheduler that serves requests."""
    import torch

    from specsim.core.engine_options import EngineOptions
    from specsim.correctness.differential.pairs import make_pair
    from specsim.serving.generation import load_engine

    config = SpecConfig(2, 3, 6, page_size=4, max_len=64)
    engine = load_engine(make_pair(PAIR), config, EngineOptions("reference", torch.float64))
    for schedule, serving in SCHEDULER.items():
        lengths = closed_loop(24, 1, (3, 30), (1, 20))
        work = SimulatedWorkload(lengths.prompt_tokens, lengths.output_tokens, np.arange(24) * 1.5)
        served = serve(engine, work, serving)
        run = simulated(engine, work, serving, served)
        check = Check("every step, preemption and end of the scheduler", 0, 0, difference(served, run))
        setting = {"schedule": schedule, "requests": len(work), "slots": serving.num_slots}
        notes = (f"{run.num_steps} steps, {run.preemptions.sum()} preemptions, {run.rounds.sum()} rounds of requests",)
        yield BenchRow("steps of the scheduler", setting, {OURS: check}, notes=notes)


@dataclass(frozen=True, slots=True)
class MadeUpTimes:
    """Seconds by requests and prompt tokens, so that a wrong number of either shows in every later step."""

    round_seconds: float = 1.0
    request: float = 0.125
    prefill_seconds: float = 0.5
    token: float = 0.03125

    def prefill(self, new_tokens: np.ndarray, contexts: np.ndarray) -> float:
        return self.prefill_seconds + self.token * float(new_tokens.sum())

    def round(self, contexts: np.ndarray, config: object) -> float:
        return self.round_seconds + self.request * len(contexts)

    def mixed(self, new_tokens: np.ndarray, behind: np.ndarray, contexts: np.ndarray, config: object) -> float:
        return self.prefill(new_tokens, behind) + self.round(contexts, config)


TIMES = MadeUpTimes()


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended."""

    first_step: int
    last_step: int
    preemptions: int
    accepted: tuple[int, ...]  # drafts of each round


@dataclass
class SchedulerRun:
    """Steps of the scheduler that launched a prefill or a round, in order."""

    starts: list[float] = field(default_factory=list)  # seconds
    running: list[int] = field(default_factory=list)  # requests in the round of each step
    prompt_tokens: list[int] = field(default_factory=list)
    settings: list[int] = field(default_factory=list)  # of the round of each step, -1 without one
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by request: accepted in each round, ended or not
    requests: dict[int, Ended] = field(default_factory=dict)


def serve(
    engine: Engine, workload: SimulatedWorkload, serving: ServingConfig, policy: AnyPolicy | None = None
) -> SchedulerRun:
    """Serve a workload with arrival times by the scheduler; a step takes the made-up time of what it launches.

    policy: of an engine with several settings.
    """
    assert workload.arrivals_s is not None
    scheduler = Scheduler(engine, serving, policy=policy)
    served = SchedulerRun()
    ordinals: dict[int, int] = {}  # of the scheduler's steps that launch, by its own number
    coming = _requests(engine, workload)
    arrivals = iter(workload.arrivals_s.tolist())
    arrival = next(arrivals, np.inf)
    now = 0.0
    planned = 0.0
    with torch.inference_mode():
        while scheduler.is_busy or arrival < np.inf:
            if not scheduler.is_busy:
                now = planned = max(now, arrival)
            while arrival <= planned:
                request = next(coming)
                request.arrival = scheduler.step_index
                scheduler.submit(request)
                arrival = next(arrivals, np.inf)
            record = scheduler.step()
            for result in record.results:
                served.drafts.setdefault(result.request_id, []).append(result.num_accepted_tokens - 1)
            start = now
            now += _step_seconds(record)
            if now > start:
                ordinals[record.step] = len(served.starts)
                _note(served, record, start)
            planned = start if serving.schedule == "overlap" and now > start else now
    for number, request in scheduler.requests.items():
        served.requests[number] = _ended(request, serving, ordinals)
    return served


def _requests(engine: Engine, workload: SimulatedWorkload) -> Iterator[Request]:
    config = engine.target.config
    for number, (prompt, new) in enumerate(zip(workload.prompt_tokens, workload.output_tokens, strict=True)):
        ids = [(7 * position + 3 * number) % min(47, config.vocab_size) for position in range(int(prompt))]
        params = SamplingParams(max_new_tokens=int(new), ignore_eos=True)
        yield make_request(config, None, number, ids, params)


def _step_seconds(record: StepRecord) -> float:
    new = np.array([chunk.end - chunk.start for chunk in record.prefilled])
    prefill = TIMES.prefill(new, new) if record.prefilled else 0.0
    return prefill + (TIMES.round(np.array(record.decoded), None) if record.decoded else 0.0)


def _note(served: SchedulerRun, record: StepRecord, start: float) -> None:
    served.starts.append(start)
    served.running.append(len(record.decoded))
    served.settings.append(record.setting if record.decoded else -1)
    served.prompt_tokens.append(sum(chunk.end - chunk.start for chunk in record.prefilled))


def _ended(request: Request, serving: ServingConfig, ordinals: dict[int, int]) -> Ended:
    late = serving.schedule == "overlap"  # a result is read in the step after its own
    first, last = (ordinals[request.emissions[index].step - late] for index in (0, -1))
    return Ended(first, last, request.num_preemptions, tuple(count - 1 for count in request.accepted))


def simulated(
    engine: Engine,
    workload: SimulatedWorkload,
    serving: ServingConfig,
    served: SchedulerRun,
    policy: AnyPolicy | None = None,
) -> SimulatedRun:
    """Simulate the same workload; every round accepts what the scheduler's did.

    policy: as for serve, but a fresh one.
    """
    configs = settings_of(engine)
    most = max(config.num_steps for config in configs)
    counts = tuple(np.array([*served.drafts.get(number, ()), 0]) for number in sorted(served.requests))
    options = [Option(config, RecordedAcceptance(counts, most)) for config in configs]
    return simulate(TIMES, options, workload, serving, prefill="beside", policy=policy, log=True)


def difference(served: SchedulerRun, run: SimulatedRun) -> str:
    """Name the first difference between the scheduler and the simulator; empty without one."""
    requests = [served.requests[number] for number in sorted(served.requests)]
    pairs = {
        "number of steps": (len(served.starts), run.num_steps),
        "start of each step": (served.starts, [step.start for step in run.log]),
        "requests in each round": (served.running, [step.running for step in run.log]),
        "setting of each round": (served.settings, [step.option for step in run.log]),
        "prompt tokens of each step": (served.prompt_tokens, [step.prompt_tokens for step in run.log]),
        "step of each first token": ([request.first_step for request in requests], run.first_steps.tolist()),
        "step of each end": ([request.last_step for request in requests], run.last_steps.tolist()),
        "preemptions": ([request.preemptions for request in requests], run.preemptions.tolist()),
        "rounds": ([len(request.accepted) for request in requests], run.rounds.tolist()),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            return f"{name}: the scheduler {theirs}, the simulator {ours}"
    return ""
