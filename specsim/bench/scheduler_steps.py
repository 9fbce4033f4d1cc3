"""The scheduler driven by a clock of made-up times, to compare its steps with those of the simulator."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from specsim.core.config import SamplingParams, ServingConfig
from specsim.core.engine import Engine
from specsim.core.policies.per_request import AnyPolicy
from specsim.serving.adaptation import settings_of
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import StepRecord
from specsim.simulator.acceptance import Option, Recorded
from specsim.simulator.results import Run
from specsim.simulator.server import simulate
from specsim.simulator.workload import Workload


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
class Served:
    """Steps of the scheduler that launched a prefill or a round, in order."""

    starts: list[float] = field(default_factory=list)  # seconds
    running: list[int] = field(default_factory=list)  # requests in the round of each step
    prompt_tokens: list[int] = field(default_factory=list)
    settings: list[int] = field(default_factory=list)  # of the round of each step, -1 without one
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by request: accepted in each round, ended or not
    requests: dict[int, Ended] = field(default_factory=dict)


def serve(engine: Engine, workload: Workload, serving: ServingConfig, policy: AnyPolicy | None = None) -> Served:
    """Serve a workload with arrival times by the scheduler; a step takes the made-up time of what it launches.

    policy: of an engine with several settings.
    """
    assert workload.arrivals_s is not None
    scheduler = Scheduler(engine, serving, policy=policy)
    served = Served()
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
            now += _seconds(record)
            if now > start:
                ordinals[record.step] = len(served.starts)
                _note(served, record, start)
            planned = start if serving.schedule == "overlap" and now > start else now
    for number, request in scheduler.requests.items():
        served.requests[number] = _ended(request, serving, ordinals)
    return served


def _requests(engine: Engine, workload: Workload) -> Iterator[Request]:
    config = engine.target.config
    for number, (prompt, new) in enumerate(zip(workload.prompt_tokens, workload.output_tokens, strict=True)):
        ids = [(7 * place + 3 * number) % min(47, config.vocab_size) for place in range(int(prompt))]
        params = SamplingParams(max_new_tokens=int(new), ignore_eos=True)
        yield make_request(config, None, number, ids, params)


def _seconds(record: StepRecord) -> float:
    new = np.array([chunk.end - chunk.start for chunk in record.prefilled])
    prefill = TIMES.prefill(new, new) if record.prefilled else 0.0
    return prefill + (TIMES.round(np.array(record.decoded), None) if record.decoded else 0.0)


def _note(served: Served, record: StepRecord, start: float) -> None:
    served.starts.append(start)
    served.running.append(len(record.decoded))
    served.settings.append(record.setting if record.decoded else -1)
    served.prompt_tokens.append(sum(chunk.end - chunk.start for chunk in record.prefilled))


def _ended(request: Request, serving: ServingConfig, ordinals: dict[int, int]) -> Ended:
    late = serving.schedule == "overlap"  # a result is read in the step after its own
    first, last = (ordinals[request.emissions[place].step - late] for place in (0, -1))
    return Ended(first, last, request.num_preemptions, tuple(count - 1 for count in request.accepted))


def simulated(
    engine: Engine, workload: Workload, serving: ServingConfig, served: Served, policy: AnyPolicy | None = None
) -> Run:
    """Simulate the same workload; every round accepts what the scheduler's did.

    policy: as for serve, but a fresh one.
    """
    configs = settings_of(engine)
    most = max(config.num_steps for config in configs)
    counts = tuple(np.array([*served.drafts.get(number, ()), 0]) for number in sorted(served.requests))
    options = [Option(config, Recorded(counts, most)) for config in configs]
    return simulate(TIMES, options, workload, serving, prefill="beside", policy=policy, log=True)


def difference(served: Served, run: Run) -> str:
    """Name the first difference between the scheduler and the simulator; empty without one."""
    requests = [served.requests[number] for number in sorted(served.requests)]
    pairs = {
        "number of steps": (len(served.starts), run.num_steps),
        "start of each step": (served.starts, [step.start for step in run.log]),
        "requests in each round": (served.running, [step.running for step in run.log]),
        "setting of each round": (served.settings, [step.option for step in run.log]),
        "prompt tokens of each step": (served.prompt_tokens, [step.prompt_tokens for step in run.log]),
        "step of each first token": ([each.first_step for each in requests], run.first_steps.tolist()),
        "step of each end": ([each.last_step for each in requests], run.last_steps.tolist()),
        "preemptions": ([each.preemptions for each in requests], run.preemptions.tolist()),
        "rounds": ([len(each.accepted) for each in requests], run.rounds.tolist()),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            return f"{name}: the scheduler {theirs}, the simulator {ours}"
    return ""
