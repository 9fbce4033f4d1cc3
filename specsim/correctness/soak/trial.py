"""A trial: a program is served, slot for slot under watch, and each of its requests compared with itself alone."""

import traceback
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from specsim.core.engine_options import EngineOptions
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.invariance.solo import alone, judge
from specsim.correctness.soak.coverage import accepted_name, exercised, verified_name
from specsim.correctness.soak.programs import Program, Submission, named
from specsim.serving.generation import load_engine
from specsim.serving.ranks import Ranks
from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler

MOST_STEPS = 20_000  # more than any program takes that ends


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What came of one program.

    counts: how often each situation occurred. mismatches: requests that differ from themselves alone although all their
    decisions can be called; an error is one more. undecidable: requests that differ where one cannot (float32 only).
    """

    name: str
    num_steps: int
    counts: dict[str, int] = field(default_factory=dict)
    mismatches: int = 0
    undecidable: int = 0
    max_logprob_error: float = 0.0
    first_difference: str | None = None


def dtype_of(impl: str) -> torch.dtype:
    """In which a column serves."""
    return torch.float64 if impl == "reference" else torch.float32


def check_named(
    name: str, impl: str = "reference", device: str | None = None, graph: str | None = None
) -> ProgramResult:
    """Serve the program of that name and compare each of its requests with itself alone."""
    return check(named(name), impl, device, graph)


@torch.inference_mode()
def check(
    program: Program, impl: str = "reference", device: str | None = None, graph: str | None = None
) -> ProgramResult:
    """Serve a program and compare each of its requests with itself alone; an error is a difference like any other."""
    pair = make_pair(program.pair, dtype_of(impl))
    schedulers = _schedulers(program, pair, impl, device, graph)
    counts = Counter()
    try:
        counts.update(_serve(program, Ranks(schedulers), pair))
        for scheduler in schedulers:
            scheduler.close()
        error = None
    except Exception as raised:
        error = f"step {schedulers[0].step_index}: {_described(raised)}"
    for scheduler in schedulers:
        counts.update(_by_depth(exercised(scheduler), program.config.num_steps))
    requests = [request for scheduler in schedulers for request in scheduler.requests.values()]
    if not program.config.is_plain:
        counts[verified_name(program.config.verifier)] = len(requests)
    found = _compare(program, pair, requests, dtype_of(impl)) if error is None else _Comparison(mismatches=1)
    return ProgramResult(
        name=program.name,
        num_steps=program.config.num_steps,
        counts=dict(counts),
        mismatches=found.mismatches,
        undecidable=found.undecidable,
        max_logprob_error=found.max_logprob_error,
        first_difference=error or found.first_difference,
    )


def _schedulers(program: Program, pair, impl: str, device: str | None, graph: str | None) -> list[Scheduler]:
    """One a rank."""
    options = EngineOptions(impl, dtype_of(impl))
    if impl == "fast":
        is_possible = (graph, program.config.release) != ("round", "round")
        graph = graph if graph and is_possible else program.graph
        options = replace(options, device=device, graph=graph, bucket=program.serving.max_running)
    engines = [load_engine(pair, program.config, options) for _ in range(program.num_ranks)]
    return [Scheduler(engine, program.serving, audits=True) for engine in engines]


def _serve(program: Program, ranks: Ranks, pair) -> Counter[str]:
    """Step until all have ended; what schedulers cannot know is counted."""
    coming, counts, first = deque(enumerate(program.submissions)), Counter(), ranks.schedulers[0]
    limits = dict(program.limits)
    last_limit = max(limits, default=-1)
    while coming or ranks.is_busy:
        step = first.step_index
        if step == program.closes_at:
            counts["closed under way"] += ranks.is_busy
            _submit(ranks, coming, len(coming), pair.target.config)
            break
        _submit(ranks, coming, sum(submission.step <= step for _, submission in coming), pair.target.config)
        for place in [place for at, place in program.aborts if at == step]:
            _abort(ranks, place)
        for scheduler in ranks.schedulers if step in limits else ():
            scheduler.limit(limits[step])
        for scheduler in ranks.schedulers:
            _poison(scheduler)
        records = ranks.step()
        is_busy = [bool(record.decoded or record.prefilled) for record in records]
        counts["steps with an idle rank"] += any(is_busy) and not all(is_busy)
        is_stuck = ranks.is_busy and all(each.is_stalled or not each.is_busy for each in ranks.schedulers)
        if (is_stuck and not coming and step > last_limit) or step > MOST_STEPS:
            raise AssertionError("requests wait that nothing holds up, and do not end")
    return counts


def _poison(scheduler: Scheduler) -> None:
    """Fill with NaN what nobody may read any more, so that it shows who does: slots that are free, and under `sync`,
    where the host knows what is committed, those that are not committed.
    """
    pools = scheduler.pools
    filled = torch.zeros(pools.num_slots // pools.page_size, dtype=torch.int64)
    for account in pools.accounts():
        filled[account.page] = account.committed if scheduler.serving.schedule == "sync" else pools.page_size
    slots = (torch.arange(pools.page_size) >= filled[:, None]).flatten().nonzero()[:, 0]
    for buffer in filter(None, (pools.target, pools.draft)):
        for values in (buffer.keys, buffer.values):
            values.index_fill_(1, slots.to(values.device), torch.nan)


def _submit(ranks: Ranks, coming: deque[tuple[int, Submission]], count: int, target_config) -> None:
    for _ in range(count):
        request_id, submission = coming.popleft()
        ranks.submit(submission.request(request_id, target_config))


def _abort(ranks: Ranks, place: int) -> None:
    holders = [request_id for request_id, home in ranks.home.items() if _holds(home.requests[request_id])]
    if holders:
        request_id = holders[place % len(holders)]
        ranks.home[request_id].abort(request_id)


def _holds(request: Request) -> bool:
    return request.row >= 0 and request.finish_reason is None


def _by_depth(counts: Counter[str], num_steps: int) -> Counter[str]:
    """Accepted drafts are counted for each depth of the tree."""
    named = {f"accepted drafts {count}": accepted_name(count, num_steps) for count in range(num_steps + 1)}
    return Counter({named.get(name, name): count for name, count in counts.items()})


@dataclass(slots=True)
class _Comparison:
    mismatches: int = 0
    undecidable: int = 0
    max_logprob_error: float = 0.0
    first_difference: str | None = None


def _compare(program: Program, pair, requests: Iterable[Request], dtype: torch.dtype) -> _Comparison:
    found = _Comparison()
    for request in requests:
        if not request.token_ids:  # rejected, or aborted before its first token
            continue
        output = alone(pair, program.config, request)
        judgement = judge(pair, program.config, request, output, dtype)
        if judgement.verdict == "different":
            found.mismatches += 1
            found.first_difference = found.first_difference or judgement.difference
        elif judgement.verdict == "undecidable":
            found.undecidable += 1
        elif errors := [abs(a - b) for a, b in zip(request.logprobs, output.logprobs, strict=False)]:
            found.max_logprob_error = max(found.max_logprob_error, *errors)
    return found


def _described(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
