"""What commands of the command line share: their options, and the settings that these stand for."""

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
from specsim.core.errors import InputError
from specsim.core.synthetic_acceptance import SCHEDULES, SyntheticAcceptance

if TYPE_CHECKING:
    from specsim.core.engine_options import EngineOptions

DTYPES = ("float32", "float64", "bfloat16", "float16")
_TREE = SpecConfig()
_SPECULATION = ("topk", "num_steps", "num_draft_tokens", "verifier", "draft_kv", "extend", "release")
_ENGINE = ("impl", "device", "graph", "bucket", "batch_invariant")
_Settings = TypeVar("_Settings", SpecConfig, SamplingParams, ServingConfig)

Impl = Annotated[str, typer.Option(help="Which column runs.", metavar="reference|fast")]
Drafter = Annotated[
    str | None, typer.Option(help="Who drafts.", metavar="eagle|eagle3|none", show_default="eagle3, or --draft's kind")
]
Topk = Annotated[int, typer.Option(help="Drafts kept at each step; 1 is a chain.")]
NumSteps = Annotated[int, typer.Option(help="Depth of the tree.")]
NumDraftTokens = Annotated[int, typer.Option(help="Nodes of the tree, root too.")]
Verifier = Annotated[
    str, typer.Option(help="How drafts are accepted; all but typical are lossless.", metavar="|".join(VERIFIERS))
]
PageSize = Annotated[int, typer.Option(help="Slots of a KV page.")]
DraftKV = Annotated[str, typer.Option(help="Whose KV a draft sees.", metavar="lane|ancestor")]
Extend = Annotated[str, typer.Option(help="Rows of draft-extend.", metavar="fixed|ragged")]
Release = Annotated[str, typer.Option(help="When slots are freed.", metavar="finish|round")]
MaxLen = Annotated[int | None, typer.Option(help="Most tokens with prompt.", show_default="the target's")]
Target = Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="the shipped one")]
Draft = Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="the shipped one")]
DraftField = Annotated[
    list[str] | None,
    typer.Option(help="A field of the drafter's config.json, which it lacks or has wrong.", metavar="NAME=JSON"),
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
        help="Share of the rounds that accept a draft at each position, whatever the target says: for timing.",
        metavar="R1,R2,...",
        show_default="the target decides",
    ),
]
AcceptSchedule = Annotated[
    str, typer.Option(help="How --accept-rates are spread over rounds.", metavar="|".join(SCHEDULES))
]
Dtype = Annotated[str, typer.Option(help="Of weights and KV.", metavar="|".join(DTYPES))]
Device = Annotated[
    str | None, typer.Option(help="Of the fast column.", metavar="cpu|cuda", show_default="a GPU if there is one")
]
Graph = Annotated[
    str | None,
    typer.Option(
        help="What the fast column replays.",
        metavar="eager|step|phase|round",
        show_default="round, or phase with --release round",
    ),
]
Bucket = Annotated[int | None, typer.Option(help="Requests its buffers hold.", show_default="the next power of two")]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Sums never depend on the batch: no library products.")
]
Regex = Annotated[str | None, typer.Option(help="Expression that the output has to match.", show_default="any text")]
JsonSchema = Annotated[
    Path | None, typer.Option(help="File with a JSON schema that the output has to match.", show_default="any text")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result here.")]


def pick(settings: type[_Settings], options: dict[str, Any]) -> _Settings:
    """Settings from the options of the same names."""
    return settings(**{field.name: options[field.name] for field in fields(settings) if field.name in options})


@contextmanager
def told_as(**names: str) -> Iterator[None]:
    """What is wrong with a field is told of the option that it comes from."""
    try:
        yield
    except InputError as error:
        raise InputError(names.get(error.name, error.name), error.value, error.allowed) from error


def speculation(options: dict[str, Any]) -> SpecConfig:
    """The tree of the options; with drafter `none` they may say nothing of it."""
    if options["drafter"] != "none":
        return pick(SpecConfig, options)
    for name in _SPECULATION:
        if options[name] != getattr(_TREE, name):
            raise InputError(name, options[name], f"only {getattr(_TREE, name)}, the default, with drafter none")
    return SpecConfig.plain(options["page_size"], options["max_len"])


def engine_options(options: dict[str, Any]) -> "EngineOptions":
    """Make the engine's options from the command line's."""
    import torch

    from specsim.core.engine_options import EngineOptions

    if options["dtype"] not in DTYPES:
        raise InputError("dtype", options["dtype"], " or ".join(DTYPES))
    dtype = getattr(torch, options["dtype"])
    return EngineOptions(dtype=dtype, **{name: options[name] for name in _ENGINE})


def acceptance(options: dict[str, Any]) -> SyntheticAcceptance | None:
    """What decides how many drafts are accepted where the target does not."""
    rates, schedule = options["accept_rates"], options["accept_schedule"]
    if rates is None:
        if schedule != SCHEDULES[0]:
            raise InputError("accept_schedule", schedule, f"only {SCHEDULES[0]}, the default, without --accept-rates")
        return None
    numbers = accepted_shares(rates)
    if options["drafter"] == "none":
        raise InputError("accept_rates", rates, "none with drafter none, which drafts nothing")
    with told_as(rates="accept_rates", schedule="accept_schedule"):  # specsim run has a --schedule that is another
        return SyntheticAcceptance(numbers, schedule).fit(options["num_steps"])


def accepted_shares(text: str) -> tuple[float, ...]:
    """The numbers of --accept-rates."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError("accept_rates", text, "numbers with commas between them, such as 0.8,0.6,0.4") from None


def pair(options: dict[str, Any]):
    """The pair of the options: a loaded one, or one with random weights on the device that will run it."""
    import torch

    if options["shape"] is None:
        from specsim.models.load import load

        return load(options["target"], options["draft"], options["drafter"], draft_fields(options))
    for name in ("target", "draft", "draft_field"):
        if options[name]:
            raise InputError(name, str(options[name]), "none with --shape, whose weights are random")
    from specsim.core.engine_options import check_device
    from specsim.models.shapes import random_pair

    device = check_device(options["device"]) if options["impl"] == "fast" else "cpu"
    drafter = None if options["drafter"] == "none" else options["drafter"] or "eagle3"
    return random_pair(options["shape"], device, getattr(torch, options["dtype"]), drafter)


def grammar(options: dict[str, Any], pair: Any):
    """What the output is constrained by, None where it is free."""
    pattern, file = options["regex"], options["json_schema"]
    if pattern is None and file is None:
        return None
    if options["accept_rates"] is not None:
        name, value = ("json_schema", str(file)) if pattern is None else ("regex", pattern)
        raise InputError(name, value, "none with --accept-rates, which asks no target")
    if pattern is not None and file is not None:
        raise InputError("json_schema", str(file), "one of --regex and --json-schema")
    from specsim.core.files import read_text
    from specsim.serving.guidance import Guidance

    if pattern is not None:
        return Guidance.regex(pair, pattern)
    allowed = "a file with a JSON schema"
    text = read_text(file, "json_schema", allowed)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("json_schema", str(file), f"{allowed} ({error})") from error
    return Guidance.json_schema(pair, schema)


def shipped_texts(count: int | None) -> list[str]:
    """So many of the shipped prompts; None: all."""
    from specsim.models.shipped import load_prompts

    texts = [prompt["text"] for prompt in load_prompts()]
    if count is not None and not 1 <= count <= len(texts):
        raise InputError("prompts", count, f"1 to {len(texts)}")
    return texts[:count]


def command(name: str, function: Callable, given: dict[str, Any], without: Collection[str] = ()) -> str:
    """The command line that gives a command's function these options, as a shell takes it, but for some of them."""
    words = name.split(" ")
    for key, parameter in signature(function).parameters.items():
        value = given[key]
        if key in without or value == parameter.default:
            continue
        for each in value if isinstance(value, list) else [value]:
            option = f"--{key.replace('_', '-')}"
            words += [option] if each is True else [option, str(each)]
    return shlex.join(words)


def draft_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of the drafter's config.json, given as NAME=JSON."""
    return dict(map(_field, options["draft_field"] or ()))


def _field(assignment: str) -> tuple[str, Any]:
    """A value that is no JSON stands for itself, so that words need no quotes."""
    name, equals, value = assignment.partition("=")
    if not name or not equals:
        raise InputError("draft_field", assignment, "NAME=JSON, such as norm_before_residual=true")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
