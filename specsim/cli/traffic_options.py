"""Options of plan, simulate and sweep for requests from files and the shape of random arrivals."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli import options
from specsim.cli.file_options import reads
from specsim.cli.options import option
from specsim.core.errors import InputError, require

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.cell import Cell


@dataclass(frozen=True, slots=True)
class TrafficGroup:
    """Requests from a file, and the shape of random arrivals."""

    workload: Annotated[
        Path | None,
        option(
            "Load",
            "File of requests, in place of random ones: Azure or BurstGPT CSV, ShareGPT JSON, or specsim's own JSON "
            "lines. Its times count; --rate scales them.",
            metavar="FILE",
            callback=reads,
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        option(
            "Load",
            "tokenizer.json, or a folder with one, that counts the tokens of a file's texts.",
            metavar="PATH",
            callback=reads,
            show_default="--characters-per-token",
        ),
    ] = None
    characters_per_token: Annotated[
        float, option("Load", "Characters of a token in a file's texts, without --tokenizer. [above 0]")
    ] = 4.0
    prefix_cache: Annotated[
        bool,
        option(
            "Server",
            "Turns of a conversation find the KV of the turns before them.",
            "--prefix-cache/--no-prefix-cache",
        ),
    ] = True
    burstiness: Annotated[
        float,
        option("Load", "Shape of the gamma distribution of gaps at a rate; 1 is Poisson, less is bursty. [above 0]"),
    ] = 1.0
    swing: Annotated[float, option("Load", "Amplitude of the rate over a period, relative to its mean. [0 to 1]")] = 0.0
    period: Annotated[float, option("Load", "Period of --swing in seconds. [above 0]")] = 86400.0


def trace_fields(traffic: TrafficGroup) -> dict[str, str | None]:
    """Make the fields of a cell for a file of requests."""
    paths = {"trace": traffic.workload, "tokenizer": traffic.tokenizer}
    return {name: None if path is None else str(path) for name, path in paths.items()}


def check_traffic(arguments: Mapping[str, Any], lengths: Mapping[str, str] | None = None) -> None:
    """InputError for options about requests that would be ignored, or that a file excludes.

    lengths: defaults of the command's lengths, where they are not those of plan.
    """
    path = arguments["workload"]
    if path is None:
        for name in ("tokenizer", "characters_per_token", "prefix_cache"):
            _check_default(name, arguments, "without --workload")
    else:
        for name in ("prompt_tokens", "output_tokens"):
            _check_default(name, arguments, "with --workload", lengths)
    if arguments["rate"] is None:
        for name in ("burstiness", "swing", "period"):
            _check_default(name, arguments, "without --rate")
    if arguments["rate"] is not None and arguments["concurrency"] is not None:
        raise options.exclusive("rate", arguments["rate"], "--concurrency")


def _check_default(name: str, arguments: Mapping[str, Any], why: str, others: Mapping[str, Any] | None = None) -> None:
    from specsim.cli.server_options import LoadGroup

    defaults = {field.name: field.default for group in (TrafficGroup, LoadGroup) for field in fields(group)}
    defaults |= others or {}
    value = arguments[name]
    require(value == defaults[name], name, str(value), f"only {defaults[name]}, the default, {why}")


def check_times(arguments: Mapping[str, Any], cell: "Cell") -> None:
    """InputError for clients, or a shape of arrivals, with a file of requests that has times of its own."""
    if cell.trace is None or cell.with_values(rate=None).workload.arrivals_s is None:
        return
    if arguments["concurrency"] is not None:
        allowed = "nothing with a file that has times of arrival: leave out --concurrency"
        raise InputError("concurrency", arguments["concurrency"], allowed)
    for name in ("burstiness", "swing", "period"):
        _check_default(name, arguments, "with a file that has times of arrival")


def describe_load(cell: "Cell") -> str:
    """Name the requests of a load and their times in a few words."""
    if cell.trace is None:
        return f"{cell.concurrency} clients" if cell.rate is None else f"{cell.rate:g} requests a second"
    name = Path(cell.trace).name
    if cell.rate is not None:
        return f"{name} at {cell.rate:g} requests a second"
    return f"{name} at its own times" if cell.has_times else f"{name}, {cell.concurrency} clients"


def show_workload(cell: "Cell", console: "Console") -> None:
    """Say what was read of a file of requests."""
    from specsim.core.display import paragraph
    from specsim.simulator.acceptance import Option
    from specsim.simulator.request_formats import read_requests

    if cell.trace is None:
        return
    file = read_requests(cell.trace, cell.tokenizer, cell.characters_per_token)
    work = cell.serving(Option.plain(cell.page_size)).workload
    cached = work.cached_columns.sum() / work.prompt_tokens.sum()
    text = f"{len(file):,} requests"
    if len(file.conversations) < len(file):
        text += f" of {len(file.conversations):,} conversations"
    text += f" ({file.format})"
    if file.skipped:
        text += f", {file.skipped:,} more without prompt or output left out"
    if len(work) < len(file):
        text += f"; each run has {len(work):,} neighbours of them"
    lengths = f"{work.prompt_tokens.mean():,.0f} tokens of prompt and {work.output_tokens.mean():,.0f} of output"
    text += f"; on average {lengths}; {cached:.0%} of prompt tokens are in the prefix cache."
    console.print()
    paragraph(console, text)
