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

from specsim.cli.file_options import reads, writes
from specsim.core.config import PRESETS, SamplingParams, ServingConfig, SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.json_schema import schema_name
from specsim.core.kinds import DEFAULT, KINDS
from specsim.core.synthetic_acceptance import SCHEDULES
from specsim.core.verifiers import VERIFIER_KINDS, VERIFIERS, one_of

if TYPE_CHECKING:
    from rich.console import Console

_LOSSY = one_of(kind for kind in VERIFIER_KINDS if not kind.is_lossless)
DTYPES = ("float32", "float64", "bfloat16", "float16")
_Settings = TypeVar("_Settings", SpecConfig, SamplingParams, ServingConfig)


def option(group: str, text: str, *names: str, **settings: Any) -> Any:
    """Make an option of a group of --help; its text may end with a range in brackets: [at least 1]."""
    return typer.Option(*names, help=text, rich_help_panel=group, **settings)


Impl = Annotated[str, option("Execution", "Implementation that runs.", metavar="reference|fast")]
Drafter = Annotated[
    str | None,
    option(
        "Model",
        f"Drafter: {', '.join(KINDS)}, MODULE:NAME of your own, or none, which is plain decoding.",
        metavar="NAME",
        show_default=f"{DEFAULT}, or the kind of --draft",
        callback=reads,
    ),
]


def _start_from(context: typer.Context, name: str | None) -> str | None:
    """Make a preset's values the defaults of the options that set them."""
    if name is not None:
        require_choice("preset", name, tuple(PRESETS))
        context.default_map = dict(PRESETS[name])
    return name


Preset = Annotated[
    str | None,
    option(
        "Draft tree",
        "Start from these settings, which other options change. naive-eagle: topk 1, one step, pages of one token.",
        metavar="|".join(PRESETS),
        show_default="none",
        is_eager=True,
        callback=_start_from,
    ),
]
Topk = Annotated[
    int,
    option("Draft tree", "Draft tokens kept at each step; 1 makes a chain. Sampling has --top-k instead. [at least 1]"),
]
NumSteps = Annotated[
    int, option("Draft tree", "Draft steps, the depth of the tree; 0 with --topk 1 is plain decoding. [at least 0]")
]
NumDraftTokens = Annotated[
    int | None,
    option(
        "Draft tree",
        "Nodes of the tree that the target verifies, root included. [at least 2]",
        show_default="num_steps + 1 for a chain, 8 for a tree, or what fits",
    ),
]
Rule = Annotated[
    str | None,
    option(
        "Verification",
        "Acceptance rule of your own, in place of the verifier.",
        metavar="FILE.py:NAME",
        show_default="none",
        callback=reads,
    ),
]
Adaptive = Annotated[
    str | None,
    option(
        "Draft tree",
        "Policy that chooses the draft steps of every round, up to --num-steps: moving-average (as in SGLang), "
        "throughput, or a JSON file of a policy or of an engine's schedule.",
        metavar="POLICY|FILE.json",
        show_default="always --num-steps",
        callback=reads,
    ),
]
AdaptivePerRequest = Annotated[
    bool,
    option(
        "Draft tree",
        "Let the policy choose draft steps for each request of a round: moving-average, goodput and scripted can.",
        "--adaptive-per-request",
    ),
]
Verifier = Annotated[
    str,
    option("Verification", f"Acceptance rule, lossless unless it is {_LOSSY}.", metavar="|".join(VERIFIERS)),
]
PageSize = Annotated[int, option("KV cache", "Tokens in a KV page. [1 to 65536]")]
DraftKV = Annotated[
    str,
    option(
        "KV cache",
        "KV that a draft token attends to: that of its lane, as in SGLang, or that of its ancestors, as in EAGLE.",
        metavar="lane|ancestor",
    ),
]
Score = Annotated[
    str,
    option(
        "Draft tree",
        "Rank drafts by products of probabilities or by sums of log-probabilities, as in EAGLE.",
        metavar="prob|logprob",
    ),
]
Penalties = Annotated[
    str,
    option(
        "Verification",
        "Penalties count the tokens on a draft's own path (exact), or not, as in engines (relaxed, not lossless).",
        metavar="exact|relaxed",
    ),
]
Extend = Annotated[
    str,
    option(
        "Execution",
        "Tokens of a request that draft-extend runs: always num_steps + 1 (fixed), or only the accepted ones (ragged).",
        metavar="fixed|ragged",
    ),
]
Release = Annotated[
    str,
    option(
        "KV cache",
        "When unused KV slots are freed: when the request ends, or after each round.",
        metavar="finish|round",
    ),
]
MaxLen = Annotated[
    int | None,
    option(
        "KV cache",
        "Longest request in tokens, prompt included; at most the target's limit. [at least 2]",
        show_default="the target's limit",
    ),
]
Target = Annotated[
    str | None,
    option("Model", "Target model: a folder or a hub id.", show_default="the shipped target, tiny", callback=reads),
]
Draft = Annotated[
    str | None,
    option("Model", "Drafter's weights: a folder or a hub id.", show_default="the shipped drafter", callback=reads),
]
DraftField = Annotated[
    list[str] | None,
    option(
        "Model",
        "Set a field that the drafter's config.json lacks or has wrong; may be repeated.",
        metavar="NAME=JSON",
    ),
]
BridgeVocabularies = Annotated[
    bool,
    option(
        "Model",
        "Draft only the tokens that target and drafter have in common, where their vocabularies differ (standalone).",
        "--bridge-vocabularies",
    ),
]
Shape = Annotated[
    str | None,
    option(
        "Model",
        "Random weights of this shape. NAME-tpK-slice is one GPU's share of K in tensor parallelism.",
        metavar="NAME|config.json|folder",
        show_default="trained weights",
        callback=reads,
    ),
]
AcceptRates = Annotated[
    str | None,
    option(
        "Acceptance",
        "Fraction of rounds that accept draft 1, 2, ...: a schedule decides in place of the target, for timing only. "
        "[0 to 1, never rising]",
        metavar="R1,R2,...",
        show_default="the target decides",
    ),
]
AcceptSchedule = Annotated[
    str,
    option("Acceptance", "How --accept-rates are spread over the rounds.", metavar="|".join(SCHEDULES)),
]
Dtype = Annotated[str, option("Execution", "Data type of weights and activations.", metavar="|".join(DTYPES))]
Device = Annotated[
    str | None,
    option(
        "Execution",
        "Device of the fast implementation.",
        metavar="cpu|cuda",
        show_default="cuda if there is a GPU, else cpu",
    ),
]
Graph = Annotated[
    str | None,
    option(
        "Execution",
        "Part of a round that the fast implementation replays as one CUDA graph; eager: none.",
        metavar="eager|step|phase|round",
        show_default="round; phase with --release round",
    ),
]
Bucket = Annotated[
    int | None,
    option(
        "Execution",
        "Batch size that the fast implementation's buffers hold. [at least 1]",
        show_default="the batch size, rounded up to a power of two",
    ),
]
BatchInvariant = Annotated[
    bool,
    option(
        "Execution",
        "Results do not depend on the batch; slower, as no library matrix products run.",
        "--batch-invariant",
    ),
]
Forward = Annotated[
    str,
    option(
        "Execution",
        "Decode and verify forwards of the target: a kernel for each step, or one resident kernel; auto: the faster "
        "one as measured.",
        metavar="auto|kernels|persistent",
    ),
]
_KV_DTYPES = "model|fp8_e4m3"
KVDtype = Annotated[
    str,
    option(
        "Execution",
        "Number format of the target's KV; fp8_e4m3: 8 bits, rounded once when written.",
        metavar=_KV_DTYPES,
        show_default="model, as --dtype",
    ),
]
DraftKVDtype = Annotated[
    str,
    option("Execution", "Number format of the drafter's KV.", metavar=_KV_DTYPES, show_default="model, as --dtype"),
]
JsonFile = Annotated[
    Path | None,
    option(
        "Output",
        "Also write the result to this JSON file; its fields: specsim schema COMMAND.",
        "--json",
        metavar="FILE",
        callback=writes,
    ),
]
HtmlFile = Annotated[
    Path | None,
    option(
        "Output",
        "Write the first 64 rounds to this HTML file, a page to click through.",
        "--html",
        metavar="FILE",
        callback=writes,
    ),
]


def pick(settings: type[_Settings], options: dict[str, Any]) -> _Settings:
    """Make settings from the options of the same names."""
    return settings(**{field.name: options[field.name] for field in fields(settings) if field.name in options})


@contextmanager
def told_as(**names: str) -> Iterator[None]:
    """Name the option in an error that names its field."""
    try:
        yield
    except InputError as error:
        if error.name not in names:
            raise
        raise InputError(names[error.name], error.value, error.allowed) from error


def exclusive(name: str, value: object, other: str) -> InputError:
    """Make the error of an option that another one excludes; other: as it is written, with its dashes."""
    option = f"--{name.replace('_', '-')}"
    display_value = value if isinstance(value, (int, float)) else str(value)
    return InputError(name, display_value, f"nothing with {other}: leave out {option} or {other}")


def without(name: str, adaptive: str | None, value: object) -> None:
    """Refuse an option that --adaptive excludes, where it is given."""
    if adaptive is not None and value not in (None, False):
        raise exclusive(name, value, "--adaptive")


def policy(adaptive: str | None, per_request: bool) -> Any:
    """Read the value of --adaptive, None without it."""
    from specsim.core.policies.named import policy_value

    if adaptive is None:
        if per_request:
            raise InputError("adaptive_per_request", True, "given with --adaptive POLICY only")
        return None
    return policy_value(adaptive, per_request)


def accepted_shares(text: str) -> tuple[float, ...]:
    """Parse the numbers of --accept-rates."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError("accept_rates", text, "numbers with commas between them, such as 0.8,0.6,0.4") from None


def shipped_texts(count: int | None, name: str = "prompts") -> list[str]:
    """Give the first `count` shipped prompts of a set; None: all."""
    from specsim.models.shipped import load_prompts

    texts = [prompt["text"] for prompt in load_prompts(name=name)]
    require(count is None or 1 <= count <= len(texts), "prompts", count, f"1 to {len(texts)}")
    return texts[:count]


def command(
    function: Callable, arguments: dict[str, Any], without: Collection[str] = ("json_file", "html_file", "preset")
) -> str:
    """Write the command line that gives a command these options, without some of them."""
    words = ["specsim", function.__name__.replace("_", "-")]
    for key, parameter in signature(function).parameters.items():
        value = arguments[key]
        if key in without or value == parameter.default:
            continue
        for single_value in value if isinstance(value, list) else [value]:
            option = f"--{key.replace('_', '-')}"
            words += [option] if single_value is True else [option, str(single_value)]
    return shlex.join(words)


def report(
    output: str, show: Callable[["Console"], object], value: dict[str, Any], json_file: Path | None, is_ok: bool = True
) -> None:
    """Print a result and write it as JSON with its schema's name; exit with status 1 unless is_ok."""
    from specsim.core.display import stdout_console
    from specsim.core.files import write_json

    try:
        show(stdout_console())
    finally:  # neither a closed terminal nor a full disk costs the other its result
        write_json(json_file, {"schema": schema_name(output)} | value)
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
