"""The soak: thousands of requests in random programs, each compared with its solo run, every slot audited.

A program is named by the seed and its index and repeats on its own, so results do not depend on how processes share
the programs.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from tqdm.auto import tqdm

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.display import figure, paragraph, print_table
from specsim.core.engine_options import check_device
from specsim.core.errors import InputError
from specsim.core.limits import JobCount, RequestCount, Seed
from specsim.core.provenance import now, versions
from specsim.core.verifiers import VERIFIERS
from specsim.core.workers import Workers, finished
from specsim.correctness.differential.grids import is_shareable
from specsim.correctness.differential.implementation import ALONE, Shares
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.soak.coverage import REQUIRED, drafted_name, required, verified_name
from specsim.correctness.soak.programs import KINDS, draw
from specsim.correctness.soak.programs import named as program_named
from specsim.correctness.soak.trial import Adaptive, ProgramResult, check_named, options_of
from specsim.serving.generation import load_engine

# Events that a soak of at least that many requests has to cover.
LEAST_REQUESTS = 2_000
REQUIRED_EVENTS = (
    *REQUIRED,
    *map(verified_name, VERIFIERS),
    *map(drafted_name, KINDS),
    "steps with an idle rank",
    "closed under way",
    "switches",
    "rounds of own draft steps",
)


class Failure(NamedTuple):
    """A failed program, its first difference, and the command that runs it again."""

    program: str
    difference: str
    command: str


@dataclass(frozen=True, slots=True)
class Soak:
    """The results of all programs."""

    command: str  # command line that gives the same result
    arguments: str  # of the command: impl, device and graph
    device: str  # the implementation ran there
    programs: tuple[ProgramResult, ...]  # in the order of their indices
    seconds: float
    date: str  # of the run, as in specsim.core.provenance; so are the versions
    versions: dict[str, str]

    @property
    def counts(self) -> dict[str, int]:
        """Count each event; a required one is listed even if it never occurred."""
        counts = Counter(dict.fromkeys(REQUIRED_EVENTS, 0))
        for program in self.programs:
            counts.update(program.counts)
        return dict(counts)

    def total(self, name: str) -> int:
        """Sum `mismatches` or `within_rounding_error` over the programs."""
        return sum(getattr(program, name) for program in self.programs)

    @property
    def max_logprob_error(self) -> float:
        """The largest logprob error of all programs."""
        return max((program.max_logprob_error for program in self.programs), default=0.0)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """List the programs in which anything differs or raises an error."""
        return tuple(
            Failure(
                program.name,
                program.first_difference or "a difference",
                f"specsim soak --program {program.name}{self.arguments}",
            )
            for program in self.programs
            if program.mismatches
        )

    @property
    def missing(self) -> tuple[str, ...] | None:
        """Required events that never occurred; None for a short run, which requires none."""
        counts = self.counts
        if counts.get("requests", 0) < LEAST_REQUESTS:
            return None
        return required(counts, {program.num_steps for program in self.programs}, REQUIRED_EVENTS)

    @property
    def is_ok(self) -> bool:
        """Whether all requests equal their solo runs, at least one, and no required event is missing."""
        return bool(self.counts.get("compared")) and not self.failures and not self.missing

    def figures(self) -> dict[str, int | float]:
        """Give the numbers of the table by their names."""
        counts = self.counts
        return {
            "programs": len(self.programs),
            **{name: counts.get(name, 0) for name in ("requests", "tokens", "steps", *REQUIRED_EVENTS)},
            **{name: counts[name] for name in sorted(counts) if name.startswith("accepted drafts")},
            **{name: counts.get(name, 0) for name in ("audits", "slots audited")},
            "mismatches": self.total("mismatches"),
            "within rounding error": self.total("within_rounding_error"),
            "largest logprob error": self.max_logprob_error,
            "seconds": self.seconds,
        }

    def to_json(self) -> dict[str, Any]:
        """Give a value that json can write; `missing` is null for a short run."""
        return {
            "command": self.command,
            "device": self.device,
            "versions": self.versions,
            "date": self.date,
            "is_ok": self.is_ok,
            "figures": self.figures(),
            "missing": self.missing,
            "failures": [failure._asdict() for failure in self.failures],
            "programs": [asdict(program) for program in self.programs],
        }

    def show(self, console: Console) -> None:
        """Print the figures, then each failure and the command that repeats it."""
        digits = {"largest logprob error": "{:.1e}", "seconds": "{:,.1f}"}
        figures = self.figures().items()
        print_table(console, (), [(name, digits.get(name, "{:,}").format(value)) for name, value in figures])
        console.print()
        for failure in self.failures:
            paragraph(console, f"{failure.program}: {failure.difference}")
            console.print(f"    {failure.command}")
        if self.missing:
            paragraph(console, f"Not covered: {', '.join(self.missing)}.")
        count = figure(self.counts.get("requests", 0), 0)
        equal = f"All {count} requests equal their solo runs, and all slots are accounted for."
        paragraph(console, equal if self.is_ok else "Not shown: that all requests equal their solo runs.")


@check_arguments
def soak(
    num_requests: RequestCount = 10_000,
    seed: Seed = 0,
    *,
    impl: str = "reference",
    device: str | None = None,
    graph: str | None = None,
    jobs: JobCount = 1,
    progress: bool = False,
    program: str | None = None,
    shares: Shares = ALONE,
    adaptive: Adaptive = None,
    policy_name: str | None = None,
) -> Soak:
    """Run random programs with that many requests in total, in `jobs` processes, or the one that is named.

    impl: the implementation that serves; solo, requests run on the reference in float64. device, graph: of the fast
    implementation, as in generate; graph None: another from program to program. shares: ranks that run this soak
    together, one process each, on programs whose models ranks can share. adaptive: a policy that switches settings
    between rounds; policy_name: its name or file in the command.
    """
    if jobs > 1 and shares.tensor_parallel > 1:
        raise InputError("jobs", jobs, "1 with tensor_parallel, whose ranks are processes already")
    options = replace(options_of(impl, device, graph), **shares._asdict())
    options = replace(options, compare_ranks=shares.tensor_parallel > 1)
    load_engine(make_pair("eagle-llama"), SpecConfig(), options)  # raises InputError for what cannot serve here
    date = now()
    start = time.perf_counter()
    names = list(_names(num_requests, seed, shares)) if program is None else [program_named(program).name]
    results = {}
    with tqdm(total=len(names), unit="program", disable=None if progress else True) as bar:
        check = partial(check_named, options=options, adaptive=adaptive)
        with closing(_results(names, min(jobs, len(names)), check)) as arriving:
            for result in arriving:
                results[result.name] = result
                bar.update()
    named = {"impl": impl if impl != "reference" else None, "device": device, "graph": graph, "adaptive": policy_name}
    arguments = _arguments(named, shares)
    drawn = f"--requests {num_requests} --seed {seed}" if program is None else f"--program {program}"
    where = check_device(device) if impl == "fast" else "cpu"
    return Soak(
        command=f"specsim soak {drawn}{arguments}",
        arguments=arguments,
        device=where,
        programs=tuple(results[name] for name in names),
        seconds=time.perf_counter() - start,
        date=date,
        versions=versions(where),
    )


def _arguments(named: Mapping[str, str | None], shares: Shares) -> str:
    """Write options of the command, without those that are not given."""
    options: dict[str, Any] = dict(named)
    if shares.tensor_parallel > 1:
        options |= {"jobs": 1} | {name.replace("_", "-"): value for name, value in shares._asdict().items()}
    return "".join(f" --{name} {value}" for name, value in options.items() if value)


def _names(num_requests: int, seed: int, shares: Shares) -> Iterator[str]:
    """Names of programs with that many requests in total, of models that these ranks can share."""
    index = 0
    while num_requests:
        program = draw(seed, index, num_requests)
        index += 1
        kind, _, family = program.pair.rpartition("-")
        is_alone = shares.tensor_parallel == 1
        if is_alone or is_shareable({"kind": kind, "family": family}, shares.draft_parallel):
            yield program.name
            num_requests -= len(program.submissions)


def _results(names: Sequence[str], jobs: int, check: Callable[[str], ProgramResult]) -> Generator[ProgramResult]:
    """Yield results as programs end.

    A process uses one thread: two would wait for each other at every small sum.
    """
    if jobs == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from map(check, names)
        finally:
            torch.set_num_threads(threads)
        return
    with Workers(jobs, partial(torch.set_num_threads, 1)) as workers:
        calls = {name: partial(check, name) for name in names}
        yield from (result for _, result in finished(workers, calls, "program {}".format))
