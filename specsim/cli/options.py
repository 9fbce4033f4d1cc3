"""Options that commands of the command line share."""

import json
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from specsim.core.config import VERIFIERS, SamplingParams, ServingConfig, SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.synthetic_acceptance import SCHEDULES

if TYPE_CHECKING:
    from rich.console import Console

DTYPES = ("float32", "float64", "bfloat16", "float16")
_Settings = TypeVar("_Settings", SpecConfig, SamplingParams, ServingConfig)

Impl = Annotated[str, typer.Option(help="Implementation that runs.", metavar="reference|fast")]
Drafter = Annotated[
    str | None,
    typer.Option(help="Drafter architecture.", metavar="eagle|eagle3|none", show_default="eagle3, or --draft's kind"),
]
Topk = Annotated[int, typer.Option(help="Drafts kept at each step; 1 is a chain. --top-k is of sampling.")]
NumSteps = Annotated[int, typer.Option(help="Depth of the tree.")]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(help="Nodes of the tree, root too.", show_default="a chain: num_steps + 1; a tree: 8, or what fits"),
]
Verifier = Annotated[
    str, typer.Option(help="Rule of acceptance; all but typical are lossless.", metavar="|".join(VERIFIERS))
]
PageSize = Annotated[int, typer.Option(help="Slots of a KV page.")]
DraftKV = Annotated[
    str,
    typer.Option(
        help="KV that a draft sees: its lane's, as in SGLang, or its ancestors', as in EAGLE.", metavar="lane|ancestor"
    ),
]
Score = Annotated[
    str,
    typer.Option(
        help="Rank drafts by products of probabilities, or by sums of logarithms, as in EAGLE.", metavar="prob|logprob"
    ),
]
Penalties = Annotated[
    str,
    typer.Option(
        help="They count a draft's own path, or, as in engines, do not: not lossless.", metavar="exact|relaxed"
    ),
]
Extend = Annotated[str, typer.Option(help="Rows of draft-extend.", metavar="fixed|ragged")]
Release = Annotated[str, typer.Option(help="Time at which slots are freed.", metavar="finish|round")]
MaxLen = Annotated[int | None, typer.Option(help="Most tokens with prompt.", show_default="the target's")]
Target = Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="tiny, the shipped one")]
Draft = Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="the shipped one")]
DraftField = Annotated[
    list[str] | None,
    typer.Option(help="Field that the drafter's config.json lacks or has wrong.", metavar="NAME=JSON"),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Random weights of this shape; NAME-tpK-slice: one GPU's share.",
        metavar="NAME|config.json|folder",
        show_default="trained weights",
    ),
]
AcceptRates = Annotated[
    str | None,
    typer.Option(
        help="Share of rounds that accept each position, in place of the target: for timing.",
        metavar="R1,R2,...",
        show_default="the target decides",
    ),
]
AcceptSchedule = Annotated[str, typer.Option(help="Spread of --accept-rates over rounds.", metavar="|".join(SCHEDULES))]
Dtype = Annotated[str, typer.Option(help="Of weights and KV.", metavar="|".join(DTYPES))]
Device = Annotated[
    str | None,
    typer.Option(help="Device of the fast implementation.", metavar="cpu|cuda", show_default="a GPU if there is one"),
]
Graph = Annotated[
    str | None,
    typer.Option(
        help="Graphs that the fast implementation replays.",
        metavar="eager|step|phase|round",
        show_default="round, or phase with --release round",
    ),
]
Bucket = Annotated[int | None, typer.Option(help="Requests its buffers hold.", show_default="the next power of two")]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Sums never depend on the batch: no library products.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result here.")]


def pick(settings: type[_Settings], options: dict[str, Any]) -> _Settings:
    """Make settings from the options of the same names."""
    return settings(**{field.name: options[field.name] for field in fields(settings) if field.name in options})


@contextmanager
def told_as(**names: str) -> Iterator[None]:
    """Name the option in an error that names its field."""
    try:
        yield
    except InputError as error:
        raise InputError(names.get(error.name, error.name), error.value, error.allowed) from error


def accepted_shares(text: str) -> tuple[float, ...]:
    """Parse the numbers of --accept-rates."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError("accept_rates", text, "numbers with commas between them, such as 0.8,0.6,0.4") from None


def shipped_texts(count: int | None) -> list[str]:
    """Give the first `count` shipped prompts; None: all."""
    from specsim.models.shipped import load_prompts

    texts = [prompt["text"] for prompt in load_prompts()]
    require(count is None or 1 <= count <= len(texts), "prompts", count, f"1 to {len(texts)}")
    return texts[:count]


def command(function: Callable, given: dict[str, Any], without: Collection[str] = ("json_file",)) -> str:
    """Write the command line that gives a command these options, without some of them."""
    words = ["specsim", function.__name__.replace("_", "-")]
    for key, parameter in signature(function).parameters.items():
        value = given[key]
        if key in without or value == parameter.default:
            continue
        for each in value if isinstance(value, list) else [value]:
            option = f"--{key.replace('_', '-')}"
            words += [option] if each is True else [option, str(each)]
    return shlex.join(words)


def report(
    show: Callable[["Console"], object], value: dict[str, Any], json_file: Path | None, is_ok: bool = True
) -> None:
    """Print a result on standard output and write it as JSON; exit status 1 unless it is as it should be."""
    from specsim.core.display import stdout_console
    from specsim.core.files import write_json

    try:
        show(stdout_console())
    finally:  # neither a closed terminal nor a full disk costs the other its result
        write_json(json_file, value)
    if not is_ok:
        raise typer.Exit(1)


def draft_field(assignment: str) -> tuple[str, Any]:
    """Parse NAME=JSON; a value that is no JSON is itself, so that words need no quotes."""
    name, equals, value = assignment.partition("=")
    require(name and equals, "draft_field", assignment, "NAME=JSON, such as norm_before_residual=true")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
