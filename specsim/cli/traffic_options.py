"""Options of plan for requests from files, service-level objectives, and files that engines read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli import options
from specsim.cli.options import option
from specsim.core.errors import InputError, require
from specsim.core.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.cell import Cell
    from specsim.simulator.highest_rate import RateGoal
    from specsim.simulator.plan import Plan


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
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        option(
            "Load",
            "tokenizer.json, or a folder with one, that counts the tokens of a file's texts.",
            metavar="PATH",
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


@dataclass(frozen=True, slots=True)
class SloGroup:
    """Bounds on latencies, and the share of requests that has to stay within them."""

    slo: Annotated[
        str | None,
        option(
            "Search",
            "Largest TTFT, TPOT and E2E latency of a request.",
            metavar="ttft=200ms,tpot=20ms,e2e=5s",
            show_default="no bounds",
        ),
    ] = None
    attainment: Annotated[
        float,
        option("Search", "Share of requests within --slo at the highest rate. [above 0, at most 1]"),
    ] = 0.99

    def goal(self, replicates: int) -> "RateGoal | None":
        """Make the goal of the highest rate; None without bounds."""
        from specsim.simulator.highest_rate import RateGoal
        from specsim.simulator.slo import Slo

        if self.slo is None:
            allowed = "only 0.99, the default, without --slo"
            require(self.attainment == 0.99, "attainment", self.attainment, allowed)
            return None
        return RateGoal(Slo.parse(self.slo), self.attainment, replicates)


_FILE = "Write the best chain by batch size as"


@dataclass(frozen=True, slots=True)
class EngineFileGroup:
    """Files with the schedule by batch size that engines read."""

    sglang_file: Annotated[
        Path | None,
        option("Output", f"{_FILE} SGLang's --speculative-adaptive-config.", metavar="FILE", show_default=False),
    ] = None
    vllm_file: Annotated[
        Path | None,
        option("Output", f"{_FILE} the value of vLLM's --speculative-config.", metavar="FILE", show_default=False),
    ] = None
    tensorrt_llm_file: Annotated[
        Path | None,
        option("Output", f"{_FILE} TensorRT-LLM's --config: YAML or JSON.", metavar="FILE", show_default=False),
    ] = None

    @property
    def paths(self) -> dict[str, Path | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def write(self, found: "Plan", draft: str) -> list[str]:
        """Write the files, all or none of them; returns the options that give them to the engines."""
        from specsim.simulator.engine_files import FILES, text

        cell = found.cell
        made = {
            path: text(FILES[name.removesuffix("_file")](found.chains, cell.drafter, draft), path)
            for name, path in self.paths.items()
            if path is not None
        }
        for path, content in made.items():
            write_whole(path, content.encode())
        return [_usage(name, path, found, draft) for name, path in self.paths.items() if path is not None]


def _usage(name: str, path: Path, found: "Plan", draft: str) -> str:
    """Write the options by which an engine reads its file."""
    from specsim.simulator.flags import sglang_flags

    if name == "sglang_file":
        first = max(found.chains, key=lambda each: (each.config.num_steps > 0, -each.low)).config
        flags = sglang_flags(found.cell, first, draft)
        return f"SGLang: {flags} --speculative-adaptive --speculative-adaptive-config {path}"
    if name == "vllm_file":
        return f'vLLM: --speculative-config "$(cat {path})"'
    return f"TensorRT-LLM: trtllm-serve --config {path}"


def check_traffic(given: Mapping[str, Any]) -> None:
    """InputError for options about requests that would be ignored, or that a file excludes."""
    path = given["workload"]
    if path is None:
        for name in ("tokenizer", "characters_per_token", "prefix_cache"):
            _check_default(name, given, "without --workload")
    else:
        for name in ("prompt_tokens", "output_tokens"):
            _check_default(name, given, "with --workload")
    if given["rate"] is None:
        for name in ("burstiness", "swing", "period"):
            _check_default(name, given, "without --rate")
    if given["rate"] is not None and given["concurrency"] is not None:
        raise options.exclusive("rate", given["rate"], "--concurrency")


def _check_default(name: str, given: Mapping[str, Any], why: str) -> None:
    from specsim.cli.server_options import LoadGroup

    defaults = {field.name: field.default for group in (TrafficGroup, LoadGroup) for field in fields(group)}
    value = given[name]
    require(value == defaults[name], name, str(value), f"only {defaults[name]}, the default, {why}")


def check_times(given: Mapping[str, Any], cell: "Cell") -> None:
    """InputError for clients, or a shape of arrivals, with a file of requests that has times of its own."""
    if cell.trace is None or cell.with_values(rate=None).workload.arrivals_s is None:
        return
    if given["concurrency"] is not None:
        allowed = "nothing with a file that has times of arrival: leave out --concurrency"
        raise InputError("concurrency", given["concurrency"], allowed)
    for name in ("burstiness", "swing", "period"):
        _check_default(name, given, "with a file that has times of arrival")


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
    from specsim.simulator.request_formats import read_requests

    if cell.trace is None:
        return
    file = read_requests(cell.trace, cell.tokenizer, cell.characters_per_token)
    work = cell.workload
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


def show_slo(found: "Plan", rates: Mapping[str, Any] | None, console: "Console") -> None:
    """Print the goodput of the best setting and the highest rate within the objectives."""
    from specsim.core.display import heading, paragraph, short_setting
    from specsim.simulator.slo import ATTAINMENT, GOODPUT

    if found.slo is None or rates is None:
        return
    best = found.best
    heading(console, f"objectives: {found.slo}")
    paragraph(
        console,
        f"{short_setting(best.config)}: {best.metrics[GOODPUT]:.2f} requests a second within all of them, "
        f"{best.metrics[ATTAINMENT]:.1f}% of requests.",
    )
    share = f"{rates['attainment']:.1%}".replace(".0%", "%")
    if rates["best"] is None:
        paragraph(console, f"No setting has {share} of requests within them at any rate.")
        return
    if rates["best"].rate == math.inf:
        size = len(found.cell.workload)
        paragraph(console, f"All {size:,} requests may come at once: too few for a highest rate, give more --requests.")
        return
    highest = f"{short_setting(rates['best'].config)}, {rates['best'].rate:.2f} requests a second"
    plain = "none" if not rates["plain"] else f"{rates['plain']:.2f}"
    paragraph(
        console,
        f"Highest rate with {share} of requests within them: {highest} (plain decoding: {plain}), found by bisection "
        "to 1%, each run from an empty server.",
    )


def show_chains(found: "Plan", console: "Console") -> None:
    """Print the schedule of chains by batch size."""
    from specsim.core.display import paragraph, short_setting

    ranges = [f"{_span(each.low, each.high)}: {short_setting(each.config)}" for each in found.chains]
    console.print()
    paragraph(console, f"Best chain by batch size, for engines that switch: {'; '.join(ranges)}.")


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
