"""Options of the simulated server, its profile and its load, and the cell that they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli import options
from specsim.cli.acceptance_options import assumed
from specsim.cli.file_options import reads
from specsim.cli.options import option
from specsim.core.errors import InputError, require
from specsim.core.kinds import DEFAULT, SERVED

if TYPE_CHECKING:
    from specsim.simulator.cell import Cell
    from specsim.simulator.workload import Length


Profile = Annotated[
    str | None,
    option(
        "Hardware",
        "Calibrated server: a shipped profile (specsim-fast, vllm-2025-dense, vllm-2026-dense, vllm-2026-experts, "
        "sglang-2026-experts, transformers-dense) or a file that calibrate wrote.",
        metavar="NAME|FILE",
        callback=reads,
        show_default="vllm-2026-dense; -experts for models with experts",
    ),
]


def profile_name(arguments: Mapping[str, Any]) -> str:
    """Name the profile of these options: the one that was given, or the default for the model."""
    from specsim.simulator.calibration.profile import default_name, profile
    from specsim.simulator.model import model

    name = arguments["profile"] or default_name(model(arguments["model"]))
    profile(name)
    return name


def sentence(cell: "Cell") -> str:
    """Say which profile a cell's simulated figures rest on."""
    from specsim.simulator.calibration.profile import profile

    name = cell.profile
    if name is None:
        return "Parameters are uncalibrated."
    made_of = profile(name).provenance
    return f"Parameters of profile {name}, fitted to {made_of['model']} on {made_of['hardware']}."


Model = Annotated[str, option("Model", "Shipped name, hub id of a shipped shape, or a config.json.", callback=reads)]
Hardware = Annotated[
    str,
    option(
        "Hardware",
        "GPU: A100-40GB-SXM, A100-80GB-SXM, H20, H100-SXM, H200, B200, RTX-3090 or RTX-4090; H100 is enough. Or a "
        ".csv or .json file of your own.",
        metavar="NAME|FILE",
        callback=reads,
    ),
]
TensorParallel = Annotated[int, option("Hardware", "GPUs that share the model by tensor parallelism. [at least 1]")]
_WITH_VOCABULARY = " or ".join(name for name, kind in SERVED.items() if kind.has_vocabulary)
DraftVocab = Annotated[int, option("Model", f"Vocabulary of an {_WITH_VOCABULARY} drafter, in tokens. [at least 1]")]
Requests = Annotated[int, option("Load", "Number of requests. [at least 1]")]
Concurrency = Annotated[
    int | None,
    option("Load", "Clients in a closed loop, each with one request at a time. [at least 1]", show_default="16"),
]
Rate = Annotated[
    float | None,
    option(
        "Load", "Poisson arrivals per second, in place of clients. [above 0]", show_default="clients in a closed loop"
    ),
]
PromptTokens = Annotated[
    str,
    option(
        "Load",
        "Prompt length in tokens: constant, uniform, or lognormal with standard deviation over mean. [at least 1]",
        metavar="N|A-B|lognormal:MEAN:CV",
    ),
]
OutputTokens = Annotated[
    str,
    option(
        "Load",
        "Output length in tokens: constant, uniform, or lognormal with standard deviation over mean. [at least 1]",
        metavar="N|A-B|lognormal:MEAN:CV",
    ),
]
Schedule = Annotated[
    str,
    option(
        "Server",
        "The host reads a step's results before it plans the next step (sync), or one step later (overlap).",
        metavar="sync|overlap",
    ),
]
PlainSchedule = Annotated[
    str | None,
    option("Server", "Schedule of plain decoding.", metavar="sync|overlap", show_default="the same as --schedule"),
]
Prefill = Annotated[
    str,
    option(
        "Server",
        "Prompts run in the round's forward pass (mixed), in their own in the same step (beside), or before it, while "
        "rounds wait (first).",
        metavar="mixed|beside|first",
    ),
]
ChunkTokens = Annotated[int, option("Server", "Largest number of prompt tokens in a step. [at least 1]")]
MaxRunning = Annotated[int, option("Server", "Largest number of running requests. [at least 1]")]
MemoryShare = Annotated[float, option("Hardware", "Fraction of GPU memory for weights and KV. [above 0, at most 1]")]
KvCacheDtype = Annotated[
    str,
    option("Model", "Numbers in the KV cache; auto: as the checkpoint's config says.", metavar="auto|bfloat16|fp8"),
]
Efficiency = Annotated[
    list[str] | None,
    option(
        "Hardware",
        "Set, whatever the profile says, a parameter of the cost model: bandwidth, compute, "
        "overlap, experts, mxfp4_experts, gap, launch, host, host_request, host_drafts, draft_step, collective or "
        "filters. May be repeated.",
        metavar="NAME=NUMBER|default",
    ),
]
Seed = Annotated[int, option("Load", "Seed of all random draws. [0 to 2^64 - 1]")]
PROMPTS = "256-768"  # spread: requests of equal length march in step, and their prompts come all at once
OUTPUTS = "128-384"


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """The model of a server of plan and sweep, its GPUs and its drafter."""

    model: Model = "llama-3.1-8b"
    hardware: Hardware = "H100-SXM"
    tensor_parallel: TensorParallel = 1
    drafter: Annotated[str, option("Model", "Drafter architecture.", metavar="|".join(SERVED))] = DEFAULT
    draft_vocab: DraftVocab = 32000
    kv_cache_dtype: KvCacheDtype = "auto"
    profile: Profile = None


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """The requests, and how the server runs them."""

    requests: Requests = 256
    concurrency: Concurrency = None
    rate: Rate = None
    prompt_tokens: PromptTokens = PROMPTS
    output_tokens: OutputTokens = OUTPUTS
    schedule: Schedule = "overlap"
    plain_schedule: PlainSchedule = None
    prefill: Prefill = "mixed"
    chunk_tokens: ChunkTokens = 8192
    max_running: MaxRunning = 256
    memory_share: MemoryShare = 0.9
    efficiency: Efficiency = None


def cell(arguments: dict[str, Any]) -> "Cell":
    """The cell of the options of its fields' names."""
    from specsim.simulator.cell import Cell

    values = {field.name: arguments[field.name] for field in fields(Cell) if arguments.get(field.name) is not None}
    values |= efficiency(arguments["efficiency"] or [])
    values["profile"] = profile_name(arguments)
    check_one_load(arguments | {"workload": None})
    for name in ("prompt_tokens", "output_tokens"):
        values[name] = length(name, values[name])
    values["shares"] = assumed(arguments).shares
    return Cell(**values)


def describe_acceptance(arguments: Mapping[str, Any], cell: "Cell") -> str:
    """Write the cell's probabilities of acceptance, and the source of these options, in a sentence."""
    best = " ".join(f"{row[0]:.2f}" for row in cell.shares)
    return f"Acceptance of the best draft at depth 1, 2, ...: {best}, {assumed(arguments).source}."


def efficiency(assignments: Sequence[str]) -> dict[str, Any]:
    """Make the fields of a cell for these values of the efficiency, each NAME=NUMBER or NAME=default."""
    from specsim.simulator.efficiency import Efficiency

    defaults = {field.name: field.default for field in fields(Efficiency)}
    allowed = f"NAME=NUMBER or NAME=default with one of {', '.join(sorted(defaults))}"
    values = {}
    for assignment in assignments:
        name, _, number = assignment.partition("=")
        require(name in defaults, "efficiency", assignment, allowed)
        try:
            values[name] = defaults[name] if number == "default" else float(number)
        except ValueError:
            raise InputError("efficiency", assignment, allowed) from None
    default_names = sorted(name for name, value in values.items() if value == defaults[name])
    return {"efficiency": Efficiency(**values), "kept": tuple(default_names)}


def check_one_load(arguments: Mapping[str, Any]) -> None:
    """InputError for more than one option among workload, rate and concurrency."""
    first, *others = [name for name in ("workload", "rate", "concurrency") if arguments.get(name) is not None] or [""]
    if others:
        raise options.exclusive(first, arguments[first], f"--{others[0]}")


def length(name: str, text: str) -> "Length":
    """Tokens of a request: a number, two with a dash between them, or a lognormal distribution."""
    from specsim.simulator.workload import LOGNORMAL, lognormal

    if text.startswith(LOGNORMAL):
        lognormal(name, text)
        return text
    try:
        least, *most = map(int, text.split("-"))
    except ValueError:
        least = 0
        most = []
    if len(most) > 1 or least < 1:
        raise InputError(name, text, "a number of tokens such as 512, or two with a dash between them: 64-512")
    return (least, most[0]) if most and most[0] != least else least
