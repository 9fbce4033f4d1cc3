"""specsim sweep: many cells, in processes of this machine or on a Dask cluster, into one SQLite file."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.option_groups import flat, with_groups
from specsim.cli.picture import check_png, png
from specsim.cli.server_options import LoadGroup, Seed, ServerGroup, cell, check_one_load, length
from specsim.core.errors import InputError, require, require_int

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.sweep import Counts

SHOWN = 10
_FIGURES = ("Output Throughput (tok/s)", "Mean TTFT (ms)", "Mean TPOT (ms)")
_LENGTHS = ("prompt_tokens", "output_tokens")


@with_groups
def sweep(
    *,
    out: Annotated[Path, typer.Option(help="SQLite file; cells that it has are kept.")],
    vary: Annotated[
        list[str], typer.Option(help="Values of an option below, or of accept_rate.", metavar="NAME=V1,V2,...")
    ],
    server: ServerGroup,
    topk: options.Topk = 1,
    num_steps: options.NumSteps = 3,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Nodes of a tree, root too.", show_default="the chain")
    ] = None,
    page_size: options.PageSize = 16,
    load: LoadGroup,
    seed: Seed = 0,
    jobs: Annotated[int | None, typer.Option(help="Processes.", show_default="one a core")] = None,
    cluster: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.", metavar="ADDRESS")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what each gets against what all get (PNG).")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Simulate every combination of some values, cell by cell into a file.

    Stopped at any moment, the same command goes on where it was.
    """
    given = flat(locals())
    from tqdm.auto import tqdm

    from specsim.core.files import check_files, write_whole
    from specsim.simulator.sweep import Results, cells, check, key
    from specsim.simulator.sweep import sweep as run

    varied = _varied(vary)
    wanted = cells(cell(given), varied)
    if all(each.rate is not None for each in wanted):
        check_one_load(given | varied)
    check_png(plot)
    check_files({"accept": load.accept}, out=out, json=json_file, plot=plot)
    check(wanted)
    names = list(dict.fromkeys(map(key, wanted)))
    with _executor(jobs, cluster) as executor, tqdm(total=len(names), unit="cell", disable=None) as bar:
        results = Results(out)
        try:
            counts = run(wanted, results, executor, bar.update)
        except BrokenExecutor as error:
            allowed = f"fewer: one was ended from outside; what is in {out} stays"
            raise InputError("jobs", jobs or os.cpu_count(), allowed) from error
    rows = results.rows(names)
    options.report(lambda console: show(rows, list(varied), counts, out, console), {"cells": rows}, json_file)
    if plot is not None:
        write_whole(plot, png("pareto", rows))


def show(rows: list[dict], varied: list[str], counts: "Counts", out: Path, console: "Console") -> None:
    """Print the best cells by throughput, and the errors of impossible ones."""
    from specsim.core.display import figure, heading, paragraph, print_table

    good = [row for row in rows if row["error"] is None]
    errors = [row["error"] for row in rows if row["error"] is not None]
    impossible = f", {len(errors):,} impossible" if errors else ""
    heading(console, f"{len(rows):,} cells: {counts.simulated:,} simulated, {counts.kept:,} kept{impossible}")
    good.sort(key=lambda row: -row["Output Throughput (tok/s)"])
    columns = ["accept_rate" if each == "shares" else each for each in varied]
    table = [
        (*(_shown(row, name) for name in varied), *(figure(row[name]) for name in _FIGURES)) for row in good[:SHOWN]
    ]
    if table:
        print_table(console, (*columns, *_FIGURES), table)
    for error in list(dict.fromkeys(errors))[:3]:
        paragraph(console, f"impossible: {error}")
    best = f"The best {min(SHOWN, len(good))} by throughput; all" if good else "All"
    console.print(f"{best} are in {out}.", soft_wrap=True)


def _shown(row: dict, name: str) -> str:
    """A value as it was given: accept_rate for shares."""
    if name != "shares":
        return str(row[name])
    (rate,), *_ = json.loads(row[name])
    return str(rate)


def _varied(assignments: list[str]) -> dict[str, list[Any]]:
    """Values by field; `accept_rate` stands for shares, the same rate for each of 16 drafts."""
    from specsim.simulator.bounds import is_number
    from specsim.simulator.sweep import FIELDS

    allowed = ("accept_rate", *(each for each in FIELDS if each not in ("shares", "efficiency")))
    varied: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        require(name and text, "vary", assignment, "NAME=V1,V2,..., such as concurrency=1,16,64")
        require(name in allowed, "vary", name, ", ".join(allowed))
        values: list[Any] = [length(name, each) if name in _LENGTHS else _value(each) for each in text.split(",")]
        if name == "accept_rate":
            if not all(is_number(value) and 0 <= value <= 1 for value in values):
                raise InputError("vary", assignment, "rates from 0 to 1")
            name = "shares"
            values = [((float(value),),) * 16 for value in values]
        require(name not in varied, "vary", assignment, "each name once, with all of its values")
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
        from multiprocessing import get_context

        with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn"), _end_with_parent) as executor:
            yield executor
        return
    require(jobs is None, "jobs", jobs, "none with --cluster, whose workers are its own")
    try:
        from distributed import Client
    except ImportError as error:
        allowed = f"none, unless Dask is installed by: pip install 'specsim[cluster]' ({error})"
        raise InputError("cluster", cluster, allowed) from error
    try:
        client = Client(cluster, timeout=10)
    except (OSError, ValueError) as error:
        raise InputError("cluster", cluster, f"the address of a Dask scheduler that answers ({error})") from error
    with client, client.get_executor() as executor:
        yield executor


def _end_with_parent() -> None:
    """End this worker as soon as its parent ends: it would wait for cells for ever."""
    from multiprocessing import parent_process

    def wait() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
