"""A trial: one program is served, every slot audited, and each of its requests compared with its solo run."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from specsim.core.engine_options import EngineOptions
from specsim.core.errors import with_location
from specsim.core.kv_buffer import KVBuffer
from specsim.core.pair import Pair
from specsim.core.policies.named import NamedPolicy, named_policy
from specsim.core.settings import Settings
from specsim.core.target import ModelConfig
from specsim.correctness.differential.cell import KV_FORMATS, storing
from specsim.correctness.invariance.replay import Proposals, ReplayedRuns, recorded
from specsim.correctness.invariance.solo import SoloComparison, SoloRuns
from specsim.correctness.soak.coverage import accepted_name, coverage_of, drafted_name, verified_name
from specsim.correctness.soak.programs import SHARED, Program, Submission, named, pair_of, possible_graph
from specsim.serving.generation import load_adaptive_engine, load_engine
from specsim.serving.ranks import Ranks
from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler

Adaptive = str | Mapping[str, Any] | None  # a policy's name or its object
_FP8_NAN = 0x7F  # of float8_e4m3fn, in which PyTorch does not fill by index
MOST_STEPS = 20_000  # more than any program takes that ends


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of one program."""

    name: str  # name of the workload: seed, index and number of requests
    num_steps: int  # depth of its trees
    counts: dict[str, int] = field(default_factory=dict)  # occurrences of each event
    mismatches: int = 0  # requests that differ from their solo runs beyond rounding; an error is one more
    within_rounding_error: int = 0  # requests that differ where a decision is within rounding error (float32 only)
    max_logprob_error: float = 0.0  # largest error of a log-probability
    first_difference: str | None = None  # first difference; None for none


def options_of(impl: str, device: str | None = None, graph: str | None = None) -> EngineOptions:
    """Options of an implementation in the dtype that it serves in."""
    dtype = torch.float64 if impl == "reference" else torch.float32
    return replace(EngineOptions(), impl=impl, dtype=dtype, device=device, graph=graph)


def check_named(name: str, options: EngineOptions, adaptive: Adaptive = None) -> ProgramResult:
    """Serve the program of that name and compare each of its requests with its solo run."""
    return check(named(name), options, adaptive)


@torch.inference_mode()
def check(program: Program, options: EngineOptions, adaptive: Adaptive = None) -> ProgramResult:
    """Serve a program and compare each of its requests with its solo run; an error counts as a difference.

    adaptive: a policy of programs that draft, in place of a program's own script. Solo runs repeat the switches.
    """
    pair = pair_of(program.pair, options.dtype)
    proposals: Proposals = {}
    policy = _policy(program, adaptive)
    schedulers = _schedulers(program, pair, options, proposals, policy)
    counts = Counter()
    try:
        counts.update(_serve(program, Ranks(schedulers), pair.target.config))
        for scheduler in schedulers:
            scheduler.close()
        error = None
    except Exception as raised:
        error = f"step {schedulers[0].step_index}: {with_location(raised)}"
    for scheduler in schedulers:
        counts.update(_by_depth(coverage_of(scheduler), program.config.num_steps))
        counts["switches"] += sum(before != now for before, now in pairwise(scheduler.choices))
    requests = [request for scheduler in schedulers for request in scheduler.requests.values()]
    counts["rounds of own draft steps"] = sum(len(request.draft_steps) for request in requests)
    if not program.config.is_plain:
        counts[verified_name(program.config.verifier)] = len(requests)
        counts[drafted_name(program.kind)] = counts["drafts accepted"]
    if error is None:  # without the rejected, and those aborted before their first token
        started = [request for request in requests if request.token_ids]
        comparison = _compare(program, pair, options.dtype, started, proposals, policy and policy.settings)
    else:
        comparison = SoloComparison(0, (), (error,), 0.0)
    counts["compared"] = comparison.num_compared
    return ProgramResult(
        name=program.name,
        num_steps=program.config.num_steps,
        counts=dict(counts),
        mismatches=len(comparison.differences),
        within_rounding_error=len(comparison.within_rounding_error),
        max_logprob_error=comparison.max_logprob_error,
        first_difference=comparison.differences[0] if comparison.differences else None,
    )


def _policy(program: Program, adaptive: Adaptive) -> NamedPolicy | None:
    if program.config.is_plain:
        return None
    script = {"policy": "scripted", "script": list(program.script), "per_request": program.has_own_steps}
    chosen = adaptive or (script if program.script else None)
    return None if chosen is None else named_policy(chosen, program.config)


def _compare(
    program: Program,
    pair: Pair,
    dtype: torch.dtype,
    requests: list[Request],
    proposals: Proposals,
    settings: Settings | None = None,
) -> SoloComparison:
    """Compare requests with their solo runs."""
    is_exact = dtype == torch.float64
    options = storing(EngineOptions(dtype=torch.float64), KV_FORMATS[program.kv if is_exact else "model"])
    if program.kind == SHARED and not program.config.is_plain:
        return ReplayedRuns(pair, program.config, dtype, proposals, options, settings).compare(requests)
    return SoloRuns(pair, program.config, dtype, options, settings=settings).compare(requests)


def _schedulers(
    program: Program, pair: Pair, options: EngineOptions, proposals: Proposals, policy: NamedPolicy | None = None
) -> list[Scheduler]:
    """Make a scheduler for each rank, and record the proposals of drafters with a shared tree.

    The program's graph mode is used unless the options name a possible one.
    """
    if options.impl == "fast":
        is_possible = options.graph and options.graph == possible_graph(options.graph, program.kind, program.config)
        graph = options.graph if is_possible else program.graph
        options = replace(options, graph=graph, bucket=program.serving.max_running)
    else:
        options = storing(options, KV_FORMATS[program.kv])
    is_shared = program.kind == SHARED
    pairs = [recorded(pair, options.impl, proposals) if is_shared else pair for _ in range(program.num_ranks)]
    if policy is None:
        engines = [load_engine(rank_pair, program.config, options) for rank_pair in pairs]
        return [Scheduler(engine, program.serving, audits=True) for engine in engines]
    switching = [load_adaptive_engine(rank_pair, policy.settings, options) for rank_pair in pairs]
    return [Scheduler(engine, program.serving, policy=policy.make(), audits=True) for engine in switching]


def _serve(program: Program, ranks: Ranks, target_config: ModelConfig) -> Counter[str]:
    """Step until all requests have ended; count the events that a scheduler cannot see."""
    coming = deque(enumerate(program.submissions))
    counts = Counter()
    limits = dict(program.limits)
    last_limit = max(limits, default=-1)
    while coming or ranks.is_busy:
        step = ranks.schedulers[0].step_index
        if step == program.closes_at:
            counts["closed under way"] += ranks.is_busy
            _submit(ranks, coming, len(coming), target_config)
            break
        _submit(ranks, coming, sum(submission.step <= step for _, submission in coming), target_config)
        for at, index in program.aborts:
            if at == step:
                _abort(ranks, index)
        for scheduler in ranks.schedulers:
            if step in limits:
                scheduler.limit(limits[step])
            scheduler.pools.audit()
            _poison(scheduler)
        records = ranks.step()
        is_busy = [bool(record.decoded or record.prefilled) for record in records]
        counts["steps with an idle rank"] += any(is_busy) and not all(is_busy)
        may_step = any(scheduler.is_busy and not scheduler.is_stalled for scheduler in ranks.schedulers)
        is_stuck = ranks.is_busy and not may_step
        if (is_stuck and not coming and step > last_limit) or step > MOST_STEPS:
            raise AssertionError("waiting requests do not end, although slots are free and no request is running")
    return counts


def _poison(scheduler: Scheduler) -> None:
    """Fill with NaN the slots that nothing may read any more, so that a read of them shows.

    They are the free slots, and under `sync`, where the host knows what is committed, those that are not committed. A
    drafter with a bonus column also keeps the column after a running request's committed ones: the KV of its root.
    """
    pools = scheduler.pools
    filled = torch.zeros(pools.num_slots // pools.page_size, dtype=torch.int64)
    for account in pools.accounts():
        filled[account.page] = account.committed if scheduler.serving.schedule == "sync" else pools.page_size
    is_read = (torch.arange(pools.page_size) < filled[:, None]).flatten()
    _fill(pools.target, ~is_read)
    bonus_columns = torch.arange(scheduler.drafter.bonus_columns)
    for request in scheduler.runner.requests:
        is_read[pools.slots(request.row, request.prefill_len + bonus_columns)] = True
    if pools.draft is not None:
        _fill(pools.draft, ~is_read)


def _fill(buffer: KVBuffer, is_filled: torch.Tensor) -> None:
    """Fill slots of a buffer with NaN."""
    for values in (buffer.keys, buffer.values):
        slots = is_filled.nonzero()[:, 0].to(values.device)
        if buffer.is_fp8:
            values.view(torch.uint8).index_fill_(1, slots, _FP8_NAN)
        else:
            values.index_fill_(1, slots, torch.nan)


def _submit(ranks: Ranks, coming: deque[tuple[int, Submission]], count: int, target_config: ModelConfig) -> None:
    for _ in range(count):
        request_id, submission = coming.popleft()
        ranks.submit(submission.request(request_id, target_config))


def _abort(ranks: Ranks, index: int) -> None:
    holders = [request_id for request_id, home in ranks.scheduler_by_id.items() if _holds(home.requests[request_id])]
    if holders:
        request_id = holders[index % len(holders)]
        if not ranks.scheduler_by_id[request_id].abort(request_id):
            raise AssertionError(f"request {request_id} is running, but abort() reports that it has ended")


def _holds(request: Request) -> bool:
    return request.row >= 0 and request.finish_reason is None


def _by_depth(counts: Counter[str], num_steps: int) -> Counter[str]:
    """Count accepted drafts separately for each depth of the tree."""
    named = {f"accepted drafts {count}": accepted_name(count, num_steps) for count in range(num_steps + 1)}
    return Counter({named.get(name, name): count for name, count in counts.items()})
