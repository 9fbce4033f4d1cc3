"""Requests under both schedules, with and without a prefix cache, each compared with its solo run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from tqdm.auto import tqdm

from specsim.core.config import ServingConfig
from specsim.core.display import figure, heading, paragraph, print_table
from specsim.core.engine import Engine
from specsim.core.errors import require
from specsim.core.files import without_nan
from specsim.core.pair import Pair
from specsim.correctness.invariance.replay import Proposals, ReplayedRuns, may_share_drafts, recorded
from specsim.correctness.invariance.solo import BUDGETS, SoloComparison, SoloRuns
from specsim.serving.generation import load_engine
from specsim.serving.serve import Served, serve
from specsim.serving.workload import ParsedRequests

MODES = tuple(
    {"schedule": schedule, "prefix_cache": prefix_cache}
    for schedule in ("sync", "overlap")
    for prefix_cache in (False, True)
)
REPLAYED = (
    "The drafts of a request may depend on other requests, so solo runs repeat each mode's drafts; greedy tokens also "
    "equal those of solo runs that draft on their own, in other rounds"
)
NOTHING = "NOT compared: all requests are rejected."
HEADINGS = ("mode", "steps", "prefill steps", "prefilled", "reused", "preempted", "seconds", "equal to solo")


@dataclass(frozen=True, slots=True)
class Mode:
    """One run, and its requests compared with their solo runs."""

    served: Served
    requests: SoloComparison  # without the rejected ones

    def __str__(self) -> str:
        serving = self.served.serving
        return serving.schedule + ", prefix cache" * serving.prefix_cache


@dataclass(frozen=True, slots=True)
class ModesComparison:
    """The runs of the same requests in every mode."""

    modes: tuple[Mode, ...]  # as ordered in MODES
    num_solo: int  # number of solo runs
    is_replayed: bool = False  # solo runs repeat the drafts of each mode, which depend on other requests

    @property
    def is_equal(self) -> bool:
        """Whether requests were compared and nothing differs, apart from decisions within rounding error."""
        return all(mode.requests.num_compared and not mode.requests.differences for mode in self.modes)

    def to_json(self) -> dict[str, Any]:
        """Give a value that json can write; null where a figure is not defined."""
        names = ("num_compared", "num_equal", "within_rounding_error", "differences")
        modes = [
            {"mode": str(mode), **{name: getattr(mode.requests, name) for name in names}, **mode.served.to_json()}
            for mode in self.modes
        ]
        return without_nan(
            {"is_equal": self.is_equal, "is_replayed": self.is_replayed, "num_solo": self.num_solo, "modes": modes}
        )

    def show(self, console: Console) -> None:
        """Print a row for each mode, then every difference and the verdict in words."""
        heading(console, "Requests compared with their solo runs, in every mode")
        print_table(console, HEADINGS, list(map(_cells, self.modes)))
        console.print()
        for mode in self.modes:
            for text in mode.requests.differences:
                paragraph(console, f"{mode}: {text}.")
            if mode.requests.within_rounding_error:
                ids = ", ".join(map(str, mode.requests.within_rounding_error))
                paragraph(console, f"{mode}: a decision is within rounding error in request {ids}, which differ.")
        for line, reason in self.modes[0].served.skipped:
            paragraph(console, f"Line {line} is skipped: not {reason}.")
        if self.is_replayed:
            paragraph(console, f"{REPLAYED}.")
        equal = "tokens, ends, rounds and logprobs are those of the solo runs"
        differs = f"NOT equal: not all {equal}." if any(mode.requests.num_compared for mode in self.modes) else NOTHING
        paragraph(console, f"Equal: {equal}." if self.is_equal else differs)


def _cells(mode: Mode) -> tuple[str, ...]:
    totals = mode.served.totals
    names = ("steps", "prefill_steps", "num_prefilled", "num_reused", "num_preemptions")
    counts = [figure(totals[name], 0) for name in names]
    return str(mode), *counts, figure(totals["seconds"]), f"{mode.requests.num_equal} of {mode.requests.num_compared}"


def compare(
    pair: Pair,
    engine: Engine,
    read: Callable[[], ParsedRequests],
    serving: ServingConfig | None = None,
    *,
    progress: bool = False,
) -> ModesComparison:
    """Serve a fresh workload of `read` in each mode, and every request once solo under the same options.

    A drafter whose drafts may depend on other requests has the solo runs of ReplayedRuns, in every mode. serving:
    shared by all modes. Raises InputError for release `round`, which cannot overlap, and for a dtype without
    a budget of logprobs.
    """
    require(engine.config.release != "round", "release", "round", "finish, the only one that can overlap")
    allowed = f"{' or '.join(map(str, BUDGETS))}, the types with a budget for logprobs"
    require(engine.dtype in BUDGETS, "dtype", engine.dtype, allowed)
    setting = (pair, engine.config, engine.dtype)
    proposals: Proposals = {}
    is_replayed = may_share_drafts(pair) and not engine.config.is_plain
    if is_replayed:
        solo = ReplayedRuns(*setting, proposals, engine.options)
        engine = load_engine(recorded(pair, engine.options.impl, proposals), engine.config, engine.options)
    else:
        solo = SoloRuns(*setting, engine.options)
    modes = []
    for mode in MODES:
        proposals.clear()
        workload = read()
        own_serving = replace(serving or ServingConfig(), **mode)
        served = serve(engine, workload.requests, own_serving, skipped=workload.skipped, progress=progress)
        compared = [request for request in served.requests if request.finish_reason != "rejected"]
        bar = tqdm(compared, "solo", unit="request", leave=False, disable=None if progress else True)
        modes.append(Mode(served, solo.compare(bar)))
    return ModesComparison(tuple(modes), solo.num_solo, is_replayed)
