"""Options of the simulated server and its load, and the cell that those of plan and sweep stand for."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.core.errors import InputError

if TYPE_CHECKING:
    from specsim.simulator.cell import Cell

Model = Annotated[str, typer.Option(help="Shipped name, its hub id, or config.json.")]
Hardware = Annotated[str, typer.Option(help="GPU; an unknown name shows them all.")]
TensorParallel = Annotated[int, typer.Option(help="GPUs that share the model.")]
DraftVocab = Annotated[int, typer.Option(help="Tokens that eagle3 knows.")]
Requests = Annotated[int, typer.Option(help="Number of requests.")]
Rate = Annotated[float | None, typer.Option(help="Requests a second that come by themselves.", show_default="clients")]
_Length = Annotated[str, typer.Option(help="Of a request, or from A to B.", metavar="N|A-B")]
Schedule = Annotated[str, typer.Option(help="When results are read.", metavar="sync|overlap")]
Prefill = Annotated[
    str,
    typer.Option(help="Prompts in the round's forward, in one of their own, or first.", metavar="mixed|beside|first"),
]
ChunkTokens = Annotated[int, typer.Option(help="Most prompt tokens a step.")]
MaxRunning = Annotated[int, typer.Option(help="Most requests with a place.")]
MemoryShare = Annotated[float, typer.Option(help="Of GPU memory, for weights and KV.")]
Seed = Annotated[int, typer.Option(help="Names all uniforms, 0 to 2^64 - 1.")]


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """The model of a server of plan and sweep, its GPUs and its drafter."""

    model: Model = "llama-3.1-8b"
    hardware: Hardware = "H100-SXM"
    tensor_parallel: TensorParallel = 1
    drafter: Annotated[str, typer.Option(help="Drafter architecture.", metavar="eagle|eagle3|mtp")] = "eagle3"
    draft_vocab: DraftVocab = 32000


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """The acceptance of drafts, the requests, and how the server runs them."""

    accept: Annotated[
        Path | None,
        typer.Option(help="Shares accepted by depth and rank (predict --json).", show_default="0.7 of each next draft"),
    ] = None
    accept_rates: Annotated[
        str | None,
        typer.Option(help="Share of rounds that accept a draft at each position of a chain.", metavar="R1,R2,..."),
    ] = None
    requests: Requests = 256
    concurrency: Annotated[
        int | None, typer.Option(help="Clients, each with one request at a time.", show_default="16")
    ] = None
    rate: Rate = None
    prompt_tokens: _Length = "512"
    output_tokens: _Length = "256"
    schedule: Schedule = "overlap"
    prefill: Prefill = "mixed"
    chunk_tokens: ChunkTokens = 8192
    max_running: MaxRunning = 256
    memory_share: MemoryShare = 0.9


def cell(given: dict[str, Any]) -> "Cell":
    """The cell of the options of its fields' names."""
    from specsim.simulator.cell import Cell, chain_shares, read_shares

    values = {field.name: given[field.name] for field in fields(Cell) if given.get(field.name) is not None}
    check_one_load(given)
    for name in ("prompt_tokens", "output_tokens"):
        values[name] = length(name, values[name])
    if given["accept"] is not None and given["accept_rates"] is not None:
        raise InputError("accept_rates", given["accept_rates"], "none with --accept")
    if given["accept"] is not None:
        values["shares"] = read_shares(given["accept"])
    if given["accept_rates"] is not None:
        values["shares"] = chain_shares(options.accepted_shares(given["accept_rates"]))
    return Cell(**values)


def check_one_load(given: Mapping[str, Any]) -> None:
    """InputError for more than one option among workload, rate and concurrency."""
    first, *others = [name for name in ("workload", "rate", "concurrency") if given.get(name) is not None] or [""]
    if others:
        raise InputError(first, str(given[first]), f"one of it and {', '.join(others)}")


def length(name: str, text: str) -> int | tuple[int, int]:
    """Tokens of a request: a number, or two with a dash between them."""
    try:
        least, *most = map(int, text.split("-"))
    except ValueError:
        least = 0
        most = []
    if len(most) > 1 or least < 1:
        raise InputError(name, text, "a number of tokens such as 512, or two with a dash between them: 64-512")
    return (least, most[0]) if most else least
