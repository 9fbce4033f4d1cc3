"""specsim sweep: many cells, in processes of this machine or on a Dask cluster, into one SQLite file."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.file_options import check_png, png
from specsim.cli.option_fields import common, option
from specsim.cli.options import DraftTreeOptions, exclusive, report
from specsim.cli.server_options import ServerOptions, length, sentence, show_workload
from specsim.core.children import ProcessLost
from specsim.core.errors import InputError, require
from specsim.core.limits import JobCount
from specsim.core.workers import Workers

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.cell import Cell
    from specsim.simulator.sweep import SweepCounts

SHOWN = 10
WORKER_WAIT = 60.0  # seconds for which a Dask cluster may have no worker
SCHEDULER_WAIT = 10  # seconds for which its scheduler may give no answer
_FIGURES = ("Output Throughput (tok/s)", "Mean TTFT (ms)", "Mean TPOT (ms)")
_LENGTHS = ("prompt_tokens", "output_tokens")
_FILES = ("trace", "tokenizer")  # of requests, one for all cells
_ORDER = (
    "Simulated, not measured, means over seeds; by throughput, with times of arrival by mean latency, and within 1% "
    "the one of fewest draft tokens."
)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ServerOptions, DraftTreeOptions):
    """Options of specsim sweep."""

    # SQLite file that collects the cells; the cells it has are kept.
    out: Annotated[Path, common("Output", file="writes")]
    # Values of one option below, or of accept_rate; may be repeated.
    vary: Annotated[list[str], common("Sweep", values="NAME=V1,V2,...", file="reads")]
    # Nodes of the tree that the target verifies, root included.
    num_draft_tokens: Annotated[
        int | None, common("Draft tree", limits="at least 2", default="num_steps + 1; a tree needs a number")
    ] = None
    # Processes that share the cells.
    jobs: Annotated[JobCount | None, option("Execution", default="one per CPU core")] = None
    # Dask scheduler to run the cells on.
    cluster: Annotated[str | None, option("Execution", values="ADDRESS", default="this machine")] = None
    # Draw tokens/s of all requests against tokens/s of one to this PNG file.
    plot: Annotated[Path | None, option("Output", file="writes")] = None

    def base_cell(self, varied: "dict[str, list[Any]]") -> "Cell":
        """Make the cell whose fields vary; InputError for options that would be ignored."""
        self.check_load(varied)
        base = self.cell(shares=self.assumed().shares)
        self.check_times(base, varied.get("concurrency"))
        return base


def sweep(options: SweepOptions) -> None:
    """Simulate every combination of settings and loads.

    Each combination is a cell of a grid. An interrupted sweep goes on where it stopped when you run it again.

    Exit status: 0 when done, 2 for bad input, 3 if a process is lost, 130 after
    Ctrl-C.

    Examples:
      specsim sweep --out cells.sqlite --vary concurrency=1,16,64
      specsim sweep --out cells.sqlite --vary num_steps=1,2,3 --vary rate=1,4
    """
    from tqdm.auto import tqdm

    from specsim.core.files import write_whole
    from specsim.simulator.sweep import Results, cells, check, key, rank_by_load
    from specsim.simulator.sweep import sweep as run

    out = options.out
    varied = _varied(options.vary)
    base = options.base_cell(varied)
    swept_cells = cells(base, varied)
    clients = options.concurrency or varied.get("concurrency")
    if clients and all(swept_cell.rate is not None for swept_cell in swept_cells):
        raise exclusive("rate", varied.get("rate", options.rate), "--concurrency")
    check_png(options.plot)
    check(swept_cells)
    names = list(dict.fromkeys(map(key, swept_cells)))
    with (
        _executor(options.jobs, options.cluster) as (executor, check_cluster),
        tqdm(total=len(names), unit="cell", disable=None) as bar,
    ):
        results = Results(out)
        try:
            counts = run(swept_cells, results, executor, bar.update, check_cluster)
        except (KeyboardInterrupt, ProcessLost) as end:
            bar.close()
            stored = f"{len(results.keys().intersection(names)):,} of {len(names):,} cells are in {out}"
            if isinstance(end, ProcessLost):
                end.stored = stored
            else:
                end.args = (stored,)  # which `main` tells
            raise
    rows = results.rows(names)
    notes = [
        "" if "shares" in varied else options.describe_acceptance(base),
        "" if "profile" in varied else sentence(base),
    ]
    value = {"cells": rows, "best": [ranking[0] for ranking in rank_by_load(rows)]}

    def print_all(console: "Console") -> None:
        show(rows, list(varied), counts, out, " ".join(filter(None, notes)), console)
        show_workload(base, console)

    try:
        report("sweep", print_all, value, options.json)
    finally:
        if options.plot is not None:
            write_whole(options.plot, png("pareto", rows), "plot")


def show(
    rows: list[dict], varied: list[str], counts: "SweepCounts", out: Path, acceptance: str, console: "Console"
) -> None:
    """Print the best setting of every load, or the best of a single load, and the errors of impossible cells."""
    from specsim.core.display import heading, paragraph
    from specsim.simulator.sweep import rank_by_load

    errors = [row["error"] for row in rows if row["error"] is not None]
    impossible = f", {len(errors):,} impossible" if errors else ""
    heading(console, f"{len(rows):,} cells: {counts.simulated:,} simulated, {counts.stored:,} kept{impossible}")
    rankings = rank_by_load(rows)
    if len(rankings) == 1:
        best_settings = rankings[0][:SHOWN]
        _print_settings(best_settings, varied, console)
        paragraph(console, f"The best {len(best_settings)} of {len(rankings[0])} settings. {_ORDER}")
    elif rankings:
        _print_settings([ranking[0] for ranking in rankings], varied, console)
        paragraph(console, f"The best setting of each of {len(rankings)} loads. {_ORDER}")
    for error in list(dict.fromkeys(errors))[:3]:
        paragraph(console, f"impossible: {error}")
    console.print(f"All cells are in {out}.", soft_wrap=True)
    if acceptance:
        paragraph(console, acceptance)


def _print_settings(rows: list[dict], varied: list[str], console: "Console") -> None:
    """Print the varied fields of rows, those of the load first, with figures."""
    from specsim.core.display import figure, print_table
    from specsim.simulator.sweep import CHOSEN

    names = sorted((name for name in varied if name != "seed"), key=lambda name: name in CHOSEN)
    table = [
        (*(_display_value(row, name) for name in names), *(figure(row[name]) for name in _FIGURES)) for row in rows
    ]
    print_table(console, (*("accept_rate" if name == "shares" else name for name in names), *_FIGURES), table)


def _display_value(row: dict, name: str) -> str:
    """A value as it was given: accept_rate for shares."""
    if name != "shares":
        return str(row[name])
    (rate,), *_ = json.loads(row[name])
    return str(rate)


def _varied(assignments: list[str]) -> dict[str, list[Any]]:
    """Values by field; `accept_rate` stands for shares, the same rate for each of 16 drafts."""
    from specsim.simulator.bounds import is_number
    from specsim.simulator.sweep import FIELDS

    allowed = ("accept_rate", *(name for name in FIELDS if name not in ("shares", "efficiency", "kept", *_FILES)))
    varied: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        require(name and text, "vary", assignment, "NAME=V1,V2,..., such as concurrency=1,16,64")
        require(name in allowed, "vary", name, ", ".join(allowed))
        values: list[Any] = [length(name, part) if name in _LENGTHS else _value(part) for part in text.split(",")]
        if name == "accept_rate":
            if not all(is_number(value) and 0 <= value <= 1 for value in values):
                raise InputError("vary", assignment, "rates from 0 to 1")
            name = "shares"
            values = [((float(value),),) * 16 for value in values]
        require(name not in varied, "vary", assignment, "each name once, with all of its values")
        require(len(set(values)) == len(values), "vary", assignment, "each value once")
        varied[name] = values
    return varied


def _value(text: str) -> Any:
    """A number, true, false or null, else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, (list, dict)) else text


ClusterCheck = Callable[[BaseException | None], None]


@contextmanager
def _executor(jobs: int | None, cluster: str | None) -> Iterator[tuple[Executor, ClusterCheck]]:
    """Start workers, or connect to a cluster; with a check that raises ProcessLost where it can run no cell."""
    if cluster is None:
        with Workers(jobs or os.cpu_count() or 1) as executor:
            yield executor, lambda _: None
        return
    if jobs is not None:
        raise exclusive("jobs", jobs, "--cluster")
    try:
        from distributed import Client
    except ImportError as error:
        allowed = f"nothing without Dask; install it: pip install 'specsim[cluster]' ({error})"
        raise InputError("cluster", cluster, allowed) from error
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # it logs tracebacks of a lost scheduler
    try:
        client = Client(cluster, timeout=SCHEDULER_WAIT)
    except (OSError, ValueError) as error:
        raise InputError("cluster", cluster, f"the address of a Dask scheduler that answers ({error})") from error
    with client, client.get_executor() as executor:
        yield executor, _cluster_check(client, cluster)


def _cluster_check(client: Any, cluster: str) -> ClusterCheck:
    """Make the check of the cluster of a Dask client."""
    from distributed import KilledWorker

    last_seen = monotonic()

    def check(error: BaseException | None) -> None:
        nonlocal last_seen
        if isinstance(error, KilledWorker):
            raise ProcessLost(f"every worker of {cluster} that tried", "ended")
        try:
            workers = client.sync(client.scheduler.identity, callback_timeout=SCHEDULER_WAIT)["workers"]
        except (OSError, TimeoutError, ValueError) as lost:
            raise ProcessLost(f"the Dask scheduler {cluster}", "gives no answer") from lost
        if workers:
            last_seen = monotonic()
        elif monotonic() > last_seen + WORKER_WAIT:
            raise ProcessLost(f"the Dask cluster {cluster}", f"has had no worker for {WORKER_WAIT:.0f} s")

    return check
