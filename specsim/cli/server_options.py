"""Options of the simulated server and its load, and the cell that those of plan and sweep stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.core.errors import InputError, require

if TYPE_CHECKING:
    from specsim.simulator import Efficiency as SimulatedEfficiency
    from specsim.simulator.cell import Cell
    from specsim.simulator.published_acceptance import PublishedAcceptance

Model = Annotated[str, typer.Option(help="Shipped name, its hub id, or config.json.")]
Hardware = Annotated[str, typer.Option(help="GPU; an unknown name shows them all.")]
TensorParallel = Annotated[int, typer.Option(help="GPUs that share the model.")]
DraftVocab = Annotated[int, typer.Option(help="Tokens that eagle3 knows.")]
Requests = Annotated[int, typer.Option(help="Number of requests.")]
Rate = Annotated[float | None, typer.Option(help="Requests a second that come by themselves.", show_default="clients")]
Length = Annotated[str, typer.Option(help="Of a request, or from A to B.", metavar="N|A-B")]
Schedule = Annotated[str, typer.Option(help="When results are read.", metavar="sync|overlap")]
Prefill = Annotated[
    str,
    typer.Option(help="Prompts in the round's forward, in one of their own, or first.", metavar="mixed|beside|first"),
]
ChunkTokens = Annotated[int, typer.Option(help="Most prompt tokens a step.")]
MaxRunning = Annotated[int, typer.Option(help="Most requests with a place.")]
MemoryShare = Annotated[float, typer.Option(help="Of GPU memory, for weights and KV.")]
Efficiency = Annotated[
    list[str] | None, typer.Option(help="Such as bandwidth=0.7; see its docstring.", metavar="NAME=NUMBER")
]
Seed = Annotated[int, typer.Option(help="Names all uniforms, 0 to 2^64 - 1.")]
PROMPTS = "256-768"  # spread: requests of equal length march in step, and their prompts come all at once
OUTPUTS = "128-384"


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
        typer.Option(help="Shares accepted by depth and rank (predict --json).", show_default="published ones"),
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
    prompt_tokens: Length = PROMPTS
    output_tokens: Length = OUTPUTS
    schedule: Schedule = "overlap"
    plain_schedule: Annotated[
        str | None,
        typer.Option(help="The same of plain decoding.", metavar="sync|overlap", show_default="as with drafts"),
    ] = None
    prefill: Prefill = "mixed"
    chunk_tokens: ChunkTokens = 8192
    max_running: MaxRunning = 256
    memory_share: MemoryShare = 0.9
    efficiency: Efficiency = None


def cell(given: dict[str, Any]) -> "Cell":
    """The cell of the options of its fields' names."""
    from specsim.simulator.cell import Cell, chain_shares, read_shares

    values = {field.name: given[field.name] for field in fields(Cell) if given.get(field.name) is not None}
    values["efficiency"] = efficiency(given["efficiency"] or [])
    check_one_load(given)
    for name in ("prompt_tokens", "output_tokens"):
        values[name] = length(name, values[name])
    if given["accept"] is not None and given["accept_rates"] is not None:
        raise InputError("accept_rates", given["accept_rates"], "none with --accept")
    if given["accept"] is not None:
        values["shares"] = read_shares(given["accept"])
    elif given["accept_rates"] is not None:
        values["shares"] = chain_shares(options.accepted_shares(given["accept_rates"]))
    else:
        values["shares"] = _published(given).shares
    return Cell(**values)


def _published(given: Mapping[str, Any]) -> "PublishedAcceptance":
    """Give the acceptance that is assumed of the model, by whatever name it goes, and the drafter."""
    from specsim.simulator.model import read_config
    from specsim.simulator.published_acceptance import published_acceptance

    return published_acceptance(given["drafter"], read_config(given["model"])[0])


def acceptance(given: Mapping[str, Any], cell: "Cell") -> str:
    """Tell the cell's probabilities of acceptance, and where these options have them from, in a sentence."""
    from specsim.simulator.published_acceptance import RANKS_SOURCE

    if given["accept"] is not None:
        source = "given by --accept"
    elif given["accept_rates"] is not None:
        source = "given by --accept-rates, which say nothing of second-best drafts: trees need --accept"
    else:
        found = _published(given)
        source = (
            f"assumed, as published for {found.pair} ({found.source}; those beyond {len(found.rates)} go on as the "
            f"last; second-best drafts as in {RANKS_SOURCE}); for another pair give --accept or --accept-rates"
        )
    best = " ".join(f"{row[0]:.2f}" for row in cell.shares)
    return f"Acceptance of the best draft at depth 1, 2, ...: {best}, {source}."


def efficiency(assignments: Sequence[str]) -> "SimulatedEfficiency":
    """Make the efficiency with these values of its fields, each NAME=NUMBER."""
    from specsim.simulator.efficiency import Efficiency

    known = {field.name for field in fields(Efficiency)}
    values = {}
    for assignment in assignments:
        name, _, number = assignment.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            name = ""
        require(name in known, "efficiency", assignment, f"NAME=NUMBER with one of {', '.join(sorted(known))}")
    return Efficiency(**values)


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
    return (least, most[0]) if most and most[0] != least else least
