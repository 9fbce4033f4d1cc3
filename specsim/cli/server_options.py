"""Options of plan, simulate and sweep: the simulated server, its acceptance and its load, and the cell of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specsim.cli.acceptance_options import AcceptanceOptions
from specsim.cli.option_fields import common, option, refuse_changes
from specsim.cli.options import JsonOptions, PageSizeOptions, exclusive
from specsim.core.errors import InputError, require
from specsim.core.kinds import SERVED
from specsim.core.limits import (
    BatchSize,
    GpuCount,
    PositiveNumber,
    Probability,
    RequestCount,
    Seed,
    Share,
    Width,
)

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.cell import Cell
    from specsim.simulator.workload import Length

ScheduleName = Literal["sync", "overlap"]
_WITH_VOCABULARY = " or ".join(name for name, kind in SERVED.items() if kind.has_vocabulary)
_LENGTH = common("Load", limits="at least 1", values="N|A-B|lognormal:MEAN:CV")
_ARRIVALS = ("burstiness", "swing", "period")


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """The GPUs of a server and the vocabulary of its drafter."""

    # GPU: A100-40GB-SXM, A100-80GB-SXM, H20, H100-SXM, H200, B200, RTX-3090 or RTX-4090; H100 is enough. Or a .csv or
    # .json file of your own.
    hardware: Annotated[str, common("Hardware", values="NAME|FILE", file="reads")] = "H100-SXM"
    # GPUs that share the model by tensor parallelism.
    tensor_parallel: Annotated[GpuCount, option("Hardware")] = 1
    # Vocabulary of an {names} drafter, in tokens.
    draft_vocab: Annotated[Width, option("Model", names=_WITH_VOCABULARY)] = 32000


@dataclass(frozen=True, kw_only=True)
class ServerOptions(GpuOptions, AcceptanceOptions, PageSizeOptions, JsonOptions):
    """A simulated server under a load."""

    # Numbers in the KV cache; auto: as the checkpoint's config says.
    kv_cache_dtype: Annotated[Literal["auto", "bfloat16", "fp8"], option("Model")] = "auto"
    # Number of requests.
    requests: Annotated[RequestCount, option("Load")] = 256
    # Clients in a closed loop, each with one request at a time.
    concurrency: Annotated[int | None, common("Load", at_least=1, default="16")] = None
    # Poisson arrivals per second, in place of clients.
    rate: Annotated[PositiveNumber | None, common("Load", default="clients in a closed loop")] = None
    # Prompt length in tokens: constant, uniform, or lognormal with standard deviation over mean.
    prompt_tokens: Annotated[str, _LENGTH] = "256-768"  # requests of equal length would march in step
    # Output length in tokens: constant, uniform, or lognormal with standard deviation over mean.
    output_tokens: Annotated[str, _LENGTH] = "128-384"
    # The host reads a step's results before it plans the next step (sync), or one step later (overlap).
    schedule: Annotated[ScheduleName, option("Server")] = "overlap"
    # Schedule of plain decoding.
    plain_schedule: Annotated[ScheduleName | None, option("Server", default="the same as --schedule")] = None
    # Prompts run in the round's forward pass (mixed), in their own in the same step (beside), or before it, while
    # rounds wait (first).
    prefill: Annotated[Literal["mixed", "beside", "first"], option("Server")] = "mixed"
    # Largest number of prompt tokens in a step.
    chunk_tokens: Annotated[int, option("Server", at_least=1)] = 8192
    # Largest number of running requests.
    max_running: Annotated[BatchSize, option("Server")] = 256
    # Fraction of GPU memory for weights and KV.
    memory_share: Annotated[Share, option("Hardware")] = 0.9
    # Set, whatever the profile says, a parameter of the cost model: bandwidth, compute, overlap, experts,
    # mxfp4_experts, gap, launch, host, host_request, host_drafts, draft_step, collective or filters. May be repeated.
    efficiency: Annotated[list[str] | None, option("Hardware", values="NAME=NUMBER|default")] = None
    # File of requests, in place of random ones: Azure or BurstGPT CSV, ShareGPT JSON, or specsim's own JSON lines. Its
    # times count; --rate scales them.
    workload: Annotated[Path | None, common("Load", file="reads")] = None
    # tokenizer.json, or a folder with one, that counts the tokens of a file's texts.
    tokenizer: Annotated[Path | None, option("Load", values="PATH", default="--characters-per-token", file="reads")] = (
        None
    )
    # Characters of a token in a file's texts, without --tokenizer.
    characters_per_token: Annotated[PositiveNumber, option("Load")] = 4.0
    # Turns of a conversation find the KV of the turns before them.
    prefix_cache: Annotated[bool, option("Server", is_negatable=True)] = True
    # Shape of the gamma distribution of gaps at a rate; 1 is Poisson, less is bursty.
    burstiness: Annotated[PositiveNumber, option("Load")] = 1.0
    # Amplitude of the rate over a period, relative to its mean.
    swing: Annotated[Probability, option("Load")] = 0.0
    # Period of --swing in seconds.
    period: Annotated[PositiveNumber, option("Load")] = 86400.0
    # Seed of all random draws.
    seed: Annotated[Seed, option("Load")] = 0

    def profile_name(self) -> str:
        """Name the profile: that of --profile, or the default for the model."""
        from specsim.simulator.calibration.profile import default_name, profile
        from specsim.simulator.model import model

        name = self.profile or default_name(model(self.model))
        profile(name)
        return name

    def cell(self, **changes: Any) -> "Cell":
        """Make the cell of the options of its fields' names, and other values of these fields."""
        from specsim.simulator.cell import Cell

        names = {field.name: field.name for field in fields(Cell)} | {"trace": "workload"}
        values: dict[str, Any] = {name: getattr(self, option, None) for name, option in names.items()}
        values = {name: value for name, value in values.items() if value is not None}
        values |= {name: str(values[name]) for name in ("trace", "tokenizer") if name in values}
        values |= efficiency(self.efficiency or [])
        values["profile"] = self.profile_name()
        self.check_one_load()
        for name in ("prompt_tokens", "output_tokens"):
            values[name] = length(name, values[name])
        return Cell(**values | changes)

    def check_one_load(self) -> None:
        """Raise InputError for a rate of clients."""
        if self.rate is not None and self.concurrency is not None:
            raise exclusive("rate", self.rate, "--concurrency")

    def check_load(self, varied: Collection[str] = ()) -> None:
        """Raise InputError for options about requests that would be ignored, or that a file excludes.

        varied: options that have several values.
        """
        if self.workload is None:
            refuse_changes(self, ("tokenizer", "characters_per_token", "prefix_cache"), "without --workload")
        else:
            refuse_changes(self, ("prompt_tokens", "output_tokens"), "with --workload")
        if self.rate is None and "rate" not in varied:
            refuse_changes(self, _ARRIVALS, "without --rate")

    def check_times(self, cell: "Cell", concurrency: Any = None) -> None:
        """Raise InputError for clients, or a shape of arrivals, with a file of requests that has times of its own.

        concurrency: several values of that option.
        """
        if cell.trace is None or cell.with_values(rate=None).workload.arrivals_s is None:
            return
        if concurrency or self.concurrency is not None:
            allowed = "nothing with a file that has times of arrival: leave out --concurrency"
            raise InputError("concurrency", concurrency or self.concurrency, allowed)
        refuse_changes(self, _ARRIVALS, "with a file that has times of arrival")

    def describe_acceptance(self, cell: "Cell") -> str:
        """Write the cell's probabilities of acceptance, and their source, in a sentence."""
        best = " ".join(f"{row[0]:.2f}" for row in cell.shares)
        return f"Acceptance of the best draft at depth 1, 2, ...: {best}, {self.assumed().source}."


def sentence(cell: "Cell") -> str:
    """Say which profile a cell's simulated figures rest on."""
    from specsim.simulator.calibration.profile import profile

    name = cell.profile
    if name is None:
        return "Parameters are uncalibrated."
    made_of = profile(name).provenance
    return f"Parameters of profile {name}, fitted to {made_of['model']} on {made_of['hardware']}."


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
    if cell.trace is None:
        return
    from specsim.core.display import paragraph
    from specsim.simulator.acceptance import Option as ServedSetting
    from specsim.simulator.request_formats import read_requests

    file = read_requests(cell.trace, cell.tokenizer, cell.characters_per_token)
    work = cell.serving(ServedSetting.plain(cell.page_size)).workload
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
