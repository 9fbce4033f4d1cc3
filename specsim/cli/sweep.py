"""specsim sweep: many cells, in processes of this machine or on a Dask cluster, into one SQLite file."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli import options
from specsim.cli.acceptance_options import AcceptanceGroup
from specsim.cli.file_options import check_png, png, reads, writes
from specsim.cli.option_groups import flat, with_groups
from specsim.cli.options import option
from specsim.cli.server_options import (
    LoadGroup,
    Seed,
    ServerGroup,
    cell,
    check_one_load,
    describe_acceptance,
    length,
    sentence,
)
from specsim.cli.traffic_options import TrafficGroup, check_times, check_traffic, show_workload, trace_fields
from specsim.core.errors import InputError, require, require_int, tell
from specsim.core.workers import Workers

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.cell import Cell
    from specsim.simulator.sweep import SweepCounts

SHOWN = 10
_FIGURES = ("Output Throughput (tok/s)", "Mean TTFT (ms)", "Mean TPOT (ms)")
_LENGTHS = ("prompt_tokens", "output_tokens")
_FILES = ("trace", "tokenizer")  # of requests, one for all cells
_ORDER = (
    "Simulated, not measured, means over seeds; by throughput, with times of arrival by mean latency, and within 1% "
    "the one of fewest draft tokens."
)


@with_groups
def sweep(
    *,
    out: Annotated[
        Path,
        option(
            "Output",
            "SQLite file that collects the cells; the cells it has are kept.",
            metavar="FILE",
            callback=writes,
        ),
    ],
    vary: Annotated[
        list[str],
        option(
            "Sweep",
            "Values of one option below, or of accept_rate; may be repeated.",
            metavar="NAME=V1,V2,...",
            callback=reads,
        ),
    ],
    server: ServerGroup,
    topk: options.Topk = 1,
    num_steps: options.NumSteps = 3,
    num_draft_tokens: Annotated[
        int | None,
        option(
            "Draft tree",
            "Nodes of the tree that the target verifies, root included. [at least 2]",
            show_default="num_steps + 1; a tree needs a number",
        ),
    ] = None,
    page_size: options.PageSize = 16,
    acceptance: AcceptanceGroup,
    load: LoadGroup,
    traffic: TrafficGroup,
    seed: Seed = 0,
    jobs: Annotated[
        int | None,
        option("Execution", "Processes that share the cells. [at least 1]", show_default="one per CPU core"),
    ] = None,
    cluster: Annotated[
        str | None,
        option("Execution", "Dask scheduler to run the cells on.", metavar="ADDRESS", show_default="this machine"),
    ] = None,
    plot: Annotated[
        Path | None,
        option(
            "Output",
            "Draw tokens/s of all requests against tokens/s of one to this PNG file.",
            metavar="FILE",
            callback=writes,
        ),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Simulate every combination of settings and loads.

    Each combination is a cell of a grid. An interrupted sweep goes on where it stopped when you run it again.

    Exit status: 0 when done, 2 for bad input, 130 after Ctrl-C.

    Examples:
      specsim sweep --out cells.sqlite --vary concurrency=1,16,64
      specsim sweep --out cells.sqlite --vary num_steps=1,2,3 --vary rate=1,4
    """
    arguments = flat(locals())
    from tqdm.auto import tqdm

    from specsim.core.files import write_whole
    from specsim.simulator.sweep import Results, cells, check, key, rank_by_load
    from specsim.simulator.sweep import sweep as run

    varied = _varied(vary)
    base = _base(arguments, varied, traffic)
    wanted = cells(base, varied)
    if all(swept_cell.rate is not None for swept_cell in wanted):
        check_one_load(arguments | varied | {"workload": None})
    check_png(plot)
    check(wanted)
    names = list(dict.fromkeys(map(key, wanted)))
    with _executor(jobs, cluster) as executor, tqdm(total=len(names), unit="cell", disable=None) as bar:
        results = Results(out)
        try:
            counts = run(wanted, results, executor, bar.update)
        except BrokenExecutor as error:
            allowed = f"fewer: a process was ended from outside, as for lack of memory; finished cells stay in {out}"
            raise InputError("jobs", jobs or os.cpu_count(), allowed) from error
        except KeyboardInterrupt:
            bar.close()
            written = len(results.keys().intersection(names))
            tell(f"interrupted; {written:,} of {len(names):,} cells are in {out}")
            sys.exit(130)  # as after every interrupt, which `main` tells in fewer words
    rows = results.rows(names)
    said = [
        "" if "shares" in varied else describe_acceptance(arguments, base),
        "" if "profile" in varied else sentence(base),
    ]
    assumed = " ".join(filter(None, said))
    value = {"cells": rows, "best": [ranking[0] for ranking in rank_by_load(rows)]}

    def print_all(console: "Console") -> None:
        show(rows, list(varied), counts, out, assumed, console)
        show_workload(base, console)

    try:
        options.report("sweep", print_all, value, json_file)
    finally:
        if plot is not None:
            write_whole(plot, png("pareto", rows), "plot")


def _base(arguments: dict[str, Any], varied: dict[str, list[Any]], traffic: TrafficGroup) -> "Cell":
    """Make the cell whose fields vary; InputError for options that would be ignored."""
    check_traffic(arguments | {"rate": varied.get("rate", arguments["rate"]), "concurrency": None})
    base = cell(arguments | trace_fields(traffic))
    check_times(arguments | {name: varied[name] for name in ("concurrency",) if name in varied}, base)
    return base


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


@contextmanager
def _executor(jobs: int | None, cluster: str | None) -> Iterator[Executor]:
    if jobs is not None:
        require_int("jobs", jobs)
    if cluster is None:
        with Workers(jobs or os.cpu_count() or 1) as executor:
            yield executor
        return
    if jobs is not None:
        raise options.exclusive("jobs", jobs, "--cluster")
    try:
        from distributed import Client
    except ImportError as error:
        allowed = f"nothing without Dask; install it: pip install 'specsim[cluster]' ({error})"
        raise InputError("cluster", cluster, allowed) from error
    try:
        client = Client(cluster, timeout=10)
    except (OSError, ValueError) as error:
        raise InputError("cluster", cluster, f"the address of a Dask scheduler that answers ({error})") from error
    with client, client.get_executor() as executor:
        yield executor
