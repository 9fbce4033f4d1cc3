"""The same requests under both schedules, without and with a prefix cache, each compared with itself alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.core.files import without_nan
from specsim.correctness.invariance.solo import BUDGETS, alone, judge
from specsim.serving.generation import Output
from specsim.serving.requests import Request
from specsim.serving.serve import Served, serve
from specsim.serving.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

WAYS = tuple((schedule, prefix_cache) for schedule in ("sync", "overlap") for prefix_cache in (False, True))
HEADINGS = ("way", "steps", "prefill steps", "prefilled", "reused", "preempted", "seconds", "equal to alone")


@dataclass(frozen=True, slots=True)
class Way:
    """One run, and what parts its requests from themselves alone.

    num_compared: all but the rejected. undecidable: ids of requests that differ where a decision is too close to call.
    """

    served: Served
    num_compared: int
    undecidable: tuple[int, ...]
    differences: tuple[str, ...]

    @property
    def num_equal(self) -> int:
        """Requests that give just what they give alone."""
        return self.num_compared - len(self.undecidable) - len(self.differences)

    def __str__(self) -> str:
        serving = self.served.serving
        return serving.schedule + ", prefix cache" * serving.prefix_cache


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs, in the order of WAYS. num_alone: runs of a request alone that they were compared with."""

    ways: tuple[Way, ...]
    num_alone: int

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, except where a decision is too close to call."""
        return not any(way.differences for way in self.ways)

    def to_json(self) -> dict:
        """A value that json can write; null where a figure is not defined."""
        names = ("num_compared", "num_equal", "undecidable", "differences")
        ways = [
            {"way": str(way), **{name: getattr(way, name) for name in names}, **way.served.to_json()}
            for way in self.ways
        ]
        return without_nan({"is_equal": self.is_equal, "num_alone": self.num_alone, "ways": ways})

    def show(self, console: "Console") -> None:
        """A line a way, then every difference and the verdict in words."""
        from specsim.core.display import heading, paragraph, print_table

        heading(console, "Each request as alone, however it is served")
        print_table(console, HEADINGS, list(map(_cells, self.ways)))
        console.print()
        for way in self.ways:
            for text in way.differences:
                paragraph(console, f"{way}: {text}.")
            if way.undecidable:
                ids = ", ".join(map(str, way.undecidable))
                paragraph(console, f"{way}: a decision is too close to call in request {ids}, which differ.")
        for line, reason in self.ways[0].served.skipped:
            paragraph(console, f"Line {line} is skipped: not {reason}.")
        equal = "tokens, ends, rounds and logprobs are those of each request alone"
        paragraph(console, f"Equal: {equal}." if self.is_equal else f"NOT equal: not all {equal}.")


def _cells(way: Way) -> tuple[str, ...]:
    from specsim.core.display import figure

    totals = way.served.totals
    names = ("steps", "prefill_steps", "num_prefilled", "num_reused", "num_preemptions")
    counts = [figure(totals[name], 0) for name in names]
    return str(way), *counts, figure(totals["seconds"]), f"{way.num_equal} of {way.num_compared}"


def compare(
    pair,
    engine,
    read: Callable[[], Workload],
    serving: ServingConfig | None = None,
    *,
    progress: bool = False,
) -> Comparison:
    """Serve what `read` gives anew for each of WAYS, and every request once alone under the same options.

    serving: what all ways share. Raises
    InputError for release `round`, which cannot overlap, and for a dtype without a budget of logprobs.
    """
    if engine.config.release == "round":
        raise InputError("release", "round", "finish, since only that can overlap")
    if engine.dtype not in BUDGETS:
        allowed = f"{' or '.join(map(str, BUDGETS))}, in which runs can be told apart"
        raise InputError("dtype", engine.dtype, allowed)
    outputs: dict[tuple[int, ...], Output] = {}
    ways = []
    for schedule, prefix_cache in WAYS:
        workload, way = read(), replace(serving or ServingConfig(), schedule=schedule, prefix_cache=prefix_cache)
        served = serve(engine, workload.requests, way, skipped=workload.skipped, progress=progress)
        compared = [request for request in served.requests if request.finish_reason != "rejected"]
        for request in tqdm(compared, "alone", unit="request", leave=False, disable=None if progress else True):
            if _key(request) not in outputs:
                outputs[_key(request)] = alone(pair, engine.config, request, engine.options)
        ways.append(_judge(pair, engine, served, [(request, outputs[_key(request)]) for request in compared]))
    return Comparison(tuple(ways), len(outputs))


def _key(request: Request) -> tuple[int, ...]:
    """What a request alone depends on within a file: a turn after an aborted one varies with what that one gave."""
    return request.request_id, *request.prompt_ids


def _judge(pair, engine, served: Served, compared: Sequence[tuple[Request, Output]]) -> Way:
    differences, undecidable = [], []
    for request, output in compared:
        judgement = judge(pair, engine.config, request, output, engine.dtype)
        if judgement.verdict == "undecidable":
            undecidable.append(request.request_id)
        elif judgement.verdict == "different":
            differences.append(judgement.difference)
    return Way(served, len(compared), tuple(undecidable), tuple(differences))
