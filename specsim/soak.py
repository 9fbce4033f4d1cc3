"""The soak: thousands of requests in random programs, each compared with itself alone, every slot accounted for.

A program is named by the seed and its index and repeats on its own, so that processes share programs and results do not
depend on how.
"""

import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm

from specsim.config import InputError, SpecConfig
from specsim.differential.pairs import make_pair
from specsim.generation import COLUMNS, load_engine
from specsim.invariance import BUDGETS, alone, difference, is_undecidable
from specsim.programs import Program, Submission, draw, named
from specsim.ranks import Ranks
from specsim.requests import Request
from specsim.scheduler import Scheduler
from specsim.situations import REQUIRED, accepted_name, exercised, required

if TYPE_CHECKING:
    from rich.console import Console

# What a soak has to go through, and from how many requests on.
LEAST_REQUESTS = 2_000
SITUATIONS = (*REQUIRED, "steps with an idle rank", "closed under way")
MOST_STEPS = 20_000  # of a program: more than any takes that ends


class Failure(NamedTuple):
    """A program that went wrong, what was seen first, and the command that runs it again."""

    program: str
    difference: str
    command: str


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


@dataclass(frozen=True, slots=True)
class Soak:
    """What came of all programs, in the order of their indices. arguments: of the command, impl, device and graph."""

    command: str
    arguments: str
    programs: tuple[ProgramResult, ...]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """How often each situation occurred; what is required is there even if it never did."""
        counts = Counter(dict.fromkeys(SITUATIONS, 0))
        for program in self.programs:
            counts.update(program.counts)
        return dict(counts)

    def total(self, name: str) -> int:
        """A sum over the programs: `mismatches` or `undecidable`."""
        return sum(getattr(program, name) for program in self.programs)

    @property
    def max_logprob_error(self) -> float:
        return max((program.max_logprob_error for program in self.programs), default=0.0)

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(
            Failure(each.name, each.first_difference, f"specsim soak --program {each.name}{self.arguments}")
            for each in self.programs
            if each.first_difference
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """What was required and never happened; a short run has to go through nothing in particular."""
        counts = self.counts
        if counts.get("requests", 0) < LEAST_REQUESTS:
            return ()
        return required(counts, {program.num_steps for program in self.programs}, SITUATIONS)

    @property
    def is_ok(self) -> bool:
        return not self.failures and not self.missing

    def figures(self) -> dict[str, int | float]:
        """The numbers of the table, by what they count."""
        counts = self.counts
        return {
            "programs": len(self.programs),
            **{name: counts.get(name, 0) for name in ("requests", "tokens", "steps", *SITUATIONS)},
            **{name: counts[name] for name in sorted(counts) if name.startswith("accepted drafts")},
            **{name: counts.get(name, 0) for name in ("audits", "slots audited")},
            "mismatches": self.total("mismatches"),
            "undecidable": self.total("undecidable"),
            "largest logprob error": self.max_logprob_error,
            "seconds": self.seconds,
        }

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        return {
            "command": self.command,
            "is_ok": self.is_ok,
            "figures": self.figures(),
            "missing": list(self.missing),
            "failures": [each._asdict() for each in self.failures],
            "programs": [asdict(each) for each in self.programs],
        }

    def show(self, console: "Console") -> None:
        """The figures, then what failed and how to see it again."""
        from specsim.display import figure, paragraph, print_table

        digits = {"largest logprob error": "{:.1e}", "seconds": "{:,.1f}"}
        figures = self.figures().items()
        print_table(console, (), [(name, digits.get(name, "{:,}").format(value)) for name, value in figures])
        console.print()
        for failure in self.failures:
            paragraph(console, f"{failure.program}: {failure.difference}")
            console.print(f"    {failure.command}")
        if self.missing:
            paragraph(console, f"Never happened: {', '.join(self.missing)}.")
        count = figure(self.counts.get("requests", 0), 0)
        equal = f"All {count} requests give what they give alone, and all slots are accounted for."
        paragraph(console, equal if self.is_ok else "Not shown: that requests give what they give alone.")


def soak(
    num_requests: int = 10_000,
    seed: int = 0,
    *,
    impl: str = "reference",
    device: str | None = None,
    graph: str | None = None,
    jobs: int = 1,
    progress: bool = False,
    program: str | None = None,
) -> Soak:
    """Run random programs of so many requests together, in `jobs` processes, or the one that is named.

    impl: the column that serves; alone, requests run on the reference in float64. device, graph: of the fast column, as
    in generate; graph None: another from program to program.
    """
    for name, value, least in (("requests", num_requests, 1), ("seed", seed, 0), ("jobs", jobs, 1)):
        if type(value) is not int or value < least:
            raise InputError(name, value, f"an integer of at least {least}")
    check_column(impl, device, graph)
    start, names = time.perf_counter(), [program] if program else list(_names(num_requests, seed))
    bar = tqdm(total=len(names), unit="program", disable=None if progress else True)
    results = []
    for result in _results(names, min(jobs, len(names)), partial(run_named, impl=impl, device=device, graph=graph)):
        results.append(result)
        bar.update()
    bar.close()
    options = {"impl": impl if impl != "reference" else None, "device": device, "graph": graph}
    arguments = "".join(f" --{name} {value}" for name, value in options.items() if value)
    asked = f"--program {program}" if program else f"--requests {num_requests} --seed {seed}"
    return Soak(f"specsim soak {asked}{arguments}", arguments, tuple(results), time.perf_counter() - start)


def check_column(impl: str, device: str | None, graph: str | None) -> None:
    """Before a long run: raise InputError for a column that cannot serve here."""
    if impl not in COLUMNS:
        raise InputError("impl", impl, " or ".join(COLUMNS))
    load_engine(make_pair("eagle-llama"), SpecConfig(), impl, _dtype(impl), device, graph)


def _dtype(impl: str) -> torch.dtype:
    return torch.float64 if impl == "reference" else torch.float32


def _names(num_requests: int, seed: int) -> Iterator[str]:
    """Programs of so many requests together."""
    index = 0
    while num_requests:
        program = draw(seed, index, num_requests)
        yield program.name
        num_requests -= len(program.submissions)
        index += 1


def _results(names: Sequence[str], jobs: int, check) -> Iterator[ProgramResult]:
    """Results in the order of the names; a process has one thread of its own."""
    if jobs == 1:
        yield from map(check, names)
        return
    # Not forked: a child may not use the parent's GPU.
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as executor:
        try:
            yield from executor.map(check, names)
        finally:  # an error or an interruption does not wait for the rest
            executor.shutdown(cancel_futures=True)


def run_named(name: str, impl: str = "reference", device: str | None = None, graph: str | None = None) -> ProgramResult:
    """Serve the program of that name and compare each of its requests with itself alone."""
    return run(named(name), impl, device, graph)


@torch.inference_mode()
def run(
    program: Program, impl: str = "reference", device: str | None = None, graph: str | None = None
) -> ProgramResult:
    """Serve a program and compare each of its requests with itself alone; an error is a difference like any other."""
    pair = make_pair(program.pair, _dtype(impl))
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
    found = _compare(program, pair, requests, _dtype(impl)) if error is None else _Comparison(mismatches=1)
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
    column = {} if impl == "reference" else {"device": device, "bucket": program.serving.max_running}
    if impl == "fast":
        is_possible = (graph, program.config.release) != ("round", "round")
        column["graph"] = graph if graph and is_possible else program.graph
    engines = [load_engine(pair, program.config, impl, _dtype(impl), **column) for _ in range(program.num_ranks)]
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
        is_stuck = all(scheduler.is_stalled or not scheduler.is_busy for scheduler in ranks.schedulers)
        if (is_stuck and ranks.is_busy and not coming and step > last_limit) or step > MOST_STEPS:
            raise AssertionError("requests wait, all slots are there, and nothing happens any more")
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
        ranks.submit(submission.request(request_id, target_config, ranks.schedulers[0].max_len))


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
        if text := difference(request, output, BUDGETS[dtype]):
            if dtype == torch.float32 and is_undecidable(pair, program.config, request, dtype):
                found.undecidable += 1
                continue
            found.mismatches += 1
            found.first_difference = found.first_difference or text
        elif errors := [abs(a - b) for a, b in zip(request.logprobs, output.logprobs, strict=False)]:
            found.max_logprob_error = max(found.max_logprob_error, *errors)
    return found


def _described(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
