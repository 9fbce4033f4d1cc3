"""specsim simulate: a server with speculation and without, or the reproduction of a published table."""

from collections.abc import Iterable
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli import options
from specsim.cli import server_options as cell
from specsim.cli.acceptance_options import (
    NAMES,
    AcceptanceFile,
    AcceptLengths,
    check_one,
    given_record,
)
from specsim.cli.file_options import check_png, png, writes
from specsim.cli.option_groups import flat, with_groups
from specsim.cli.options import option
from specsim.cli.server_options import Profile, profile_name
from specsim.cli.traffic_options import TrafficGroup, check_times, check_traffic, show_workload, trace_fields
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.kinds import DEFAULT, SERVED

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.acceptance import Option, PerPosition
    from specsim.simulator.cell import Cell

CLIENTS = 64
RATES = "0.73,0.52,0.35"  # vllm#32030, Llama-3.1-8B with EAGLE-3
_LENGTHS = ("prompt_tokens", "output_tokens")
_DRAFTING = ("draft_vocab", "topk", "num_steps", "num_draft_tokens", "adaptive", "adaptive_per_request", *NAMES)


@with_groups
def simulate(
    *,
    table: Annotated[
        str | None,
        option(
            "Published table",
            "Reproduce a published table, without other options: fast_rounds, leviathan_table1, leviathan_table4, "
            "sglang_6995, spec_bench, vllm_20780 or vllm_41162.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    model: cell.Model = "llama-3.1-8b",
    hardware: cell.Hardware = "H100-SXM",
    tensor_parallel: cell.TensorParallel = 1,
    drafter: Annotated[
        str, option("Model", "Drafter architecture; none is plain decoding.", metavar="|".join((*SERVED, "none")))
    ] = DEFAULT,
    draft_vocab: cell.DraftVocab = 32000,
    kv_cache_dtype: cell.KvCacheDtype = "auto",
    topk: options.Topk = 1,
    num_steps: options.NumSteps = 3,
    num_draft_tokens: options.NumDraftTokens = None,
    adaptive: options.Adaptive = None,
    adaptive_per_request: options.AdaptivePerRequest = False,
    page_size: options.PageSize = 16,
    acceptance: AcceptanceFile = None,
    accept_lengths: AcceptLengths = None,
    accept_rates: Annotated[
        str | None,
        option(
            "Acceptance",
            "Fraction of rounds that accept at least 1, 2, ... drafts, for each step. [0 to 1, never rising]",
            metavar="R1,R2,...",
            show_default=RATES,
        ),
    ] = None,
    requests: cell.Requests = 1000,
    prompt_tokens: cell.PromptTokens = cell.PROMPTS,
    output_tokens: cell.OutputTokens = "64-192",
    concurrency: Annotated[
        int | None,
        option("Load", "Clients in a closed loop, each with one request at a time. [at least 1]", show_default="64"),
    ] = None,
    rate: cell.Rate = None,
    traffic: TrafficGroup,
    schedule: cell.Schedule = "overlap",
    plain_schedule: cell.PlainSchedule = None,
    prefill: cell.Prefill = "mixed",
    max_running: cell.MaxRunning = 256,
    chunk_tokens: cell.ChunkTokens = 8192,
    memory_share: cell.MemoryShare = 0.9,
    profile: Profile = None,
    efficiency: cell.Efficiency = None,
    seed: cell.Seed = 0,
    json_file: options.JsonFile = None,
    plot: Annotated[
        Path | None,
        option(
            "Output",
            "Draw speed-up against running requests to this PNG file.",
            metavar="FILE",
            show_default=False,
            callback=writes,
        ),
    ] = None,
) -> None:
    """Simulate a server with and without speculation.

    No model runs: a cost model gives the time of each step. With --table, the server is that of a published table.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim simulate --hardware H200 --concurrency 32 --num-steps 2
      specsim simulate --table vllm_20780
    """
    arguments = flat(locals())
    from specsim.core.display import paragraph
    from specsim.core.files import write_whole
    from specsim.simulator.reproduce import reproduction
    from specsim.simulator.show import compare, show, show_table

    check_png(plot)
    if table is not None:
        _check_default([name for name in arguments if name not in ("table", "json_file")], arguments, "with --table")
        result = reproduction(table)()
        options.report("simulate-table", lambda console: show_table(result, console), result.to_json(), json_file)
        return
    served, option = _served(arguments, traffic)
    scenario = served.serving(option)
    scenario = replace(scenario, plain_schedule=plain_schedule or scenario.plain_schedule)
    if plot and scenario.option.config.is_plain:
        raise InputError("plot", str(plot), "nothing with --drafter none, which has no speed-up to draw")
    picture = png("speedup", {scenario.hardware.name: scenario}) if plot else b""
    compared = compare(scenario)
    said = _acceptance_source(arguments)

    def print_all(console: "Console") -> None:
        show(compared, console)
        show_workload(served, console)
        if said:
            console.print()
            paragraph(console, said)

    try:
        options.report("simulate", print_all, compared.to_json(), json_file)
    finally:
        if plot:
            write_whole(plot, picture, "plot")


def _check_default(names: Iterable[str], arguments: dict[str, Any], why: str) -> None:
    """InputError for an option that would be ignored."""
    for name in names:
        default = signature(simulate).parameters[name].default
        require(arguments[name] == default, name, str(arguments[name]), f"only {default}, the default, {why}")


def _served(arguments: dict[str, Any], traffic: TrafficGroup) -> tuple["Cell", "Option"]:
    """Make the server under its load, and the option that it serves with."""
    from specsim.simulator.acceptance import Option
    from specsim.simulator.cell import Cell
    from specsim.simulator.request_formats import read_requests

    require_choice("drafter", arguments["drafter"], (*SERVED, "none"))
    cell.check_one_load(arguments | {"workload": None})
    values = {field.name: arguments[field.name] for field in fields(Cell) if field.name in arguments}
    if traffic.workload is not None:
        _check_default(("requests", *_LENGTHS), arguments, "with --workload")
        values["requests"] = len(read_requests(traffic.workload, traffic.tokenizer, traffic.characters_per_token))
    check_traffic(arguments, {name: signature(simulate).parameters[name].default for name in _LENGTHS})
    values |= cell.efficiency(arguments["efficiency"] or []) | trace_fields(traffic)
    values["profile"] = profile_name(arguments)
    for name in _LENGTHS:
        values[name] = cell.length(name, values[name])
    if arguments["concurrency"] is None:
        values["concurrency"] = CLIENTS
    if arguments["drafter"] == "none":
        _check_default(_DRAFTING, arguments, "with drafter none")
        option = Option.plain(arguments["page_size"])
        values["drafter"] = DEFAULT  # plain decoding ignores it
    else:
        option = Option(options.pick(SpecConfig, arguments), _acceptance(arguments))
    simulated_cell = Cell(**values)
    check_times(arguments, simulated_cell)
    return simulated_cell, option


def _acceptance(arguments: dict[str, Any]) -> "PerPosition":
    """Acceptance of as many drafts as there are steps; rates beyond them are ignored."""
    from specsim.simulator.acceptance import PerPosition

    check_one(arguments)
    record = given_record(arguments)
    if record is not None:
        from specsim.simulator.record_shares import setting_acceptance

        return setting_acceptance(record, options.pick(SpecConfig, arguments))
    text = arguments["accept_rates"] or RATES
    steps = arguments["num_steps"]
    rates = options.accepted_shares(text)
    if arguments["accept_rates"] is None:
        allowed = f"at most {len(rates)} unless --acceptance, --accept-lengths or --accept-rates gives more"
        require(steps <= len(rates), "num_steps", steps, allowed)
    require(len(rates) >= steps, "accept_rates", text, f"{steps} rates, one for each of the num_steps")
    try:
        return PerPosition(rates[:steps])
    except InputError as error:
        raise InputError("accept_rates", text, error.allowed) from error


def _acceptance_source(arguments: dict[str, Any]) -> str:
    """Say where the acceptance comes from; empty for rates and for plain decoding."""
    record = given_record(arguments)
    if record is None:
        return ""
    from specsim.simulator.record_shares import setting_source

    return setting_source(record, options.pick(SpecConfig, arguments))
