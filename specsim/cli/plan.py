"""specsim plan: the best setting for a model, hardware and load."""

import math
from typing import TYPE_CHECKING, Annotated

from specsim.cli import options
from specsim.cli.acceptance_options import AcceptanceGroup
from specsim.cli.engine_file_options import EngineFileGroup, show_chains
from specsim.cli.option_groups import flat, with_groups
from specsim.cli.options import option
from specsim.cli.server_options import LoadGroup, Seed, ServerGroup, cell, describe_acceptance
from specsim.cli.slo_options import SloGroup, highest_rates, plain_values, show_slo
from specsim.cli.traffic_options import (
    TrafficGroup,
    check_times,
    check_traffic,
    describe_load,
    show_workload,
    trace_fields,
)
from specsim.core.errors import require_int

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.plan import Candidate, Plan

SHOWN = 12


@with_groups
def plan(
    *,
    server: ServerGroup,
    acceptance: AcceptanceGroup,
    load: LoadGroup,
    traffic: TrafficGroup,
    page_size: options.PageSize = 16,
    seed: Seed = 0,
    replicates: Annotated[
        int, option("Search", "Simulated runs of each setting, each with other requests. [at least 1]")
    ] = 8,
    objective: Annotated[
        str | None,
        option(
            "Search",
            "Figure to optimise.",
            metavar="throughput|latency|goodput",
            show_default="throughput; latency with --rate; goodput with --slo",
        ),
    ] = None,
    slos: SloGroup,
    policies: Annotated[
        bool,
        option("Search", "Also compare policies that choose the number of drafts in every round.", "--policies"),
    ] = False,
    draft: Annotated[
        str, option("Output", "Drafter's path or hub id in the printed flags of SGLang and vLLM.", metavar="NAME")
    ] = "DRAFT_MODEL",
    files: EngineFileGroup,
    json_file: options.JsonFile = None,
) -> None:
    """Find the best setting for a model, GPUs and a load.

    Prints the candidates, the best setting by batch size, and the flags for SGLang and vLLM. With --slo it also finds
    the highest rate within the objectives. No model runs: times come from the simulator.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim plan --model llama-3.1-8b --hardware H100-SXM --concurrency 32
      specsim plan --rate 4 --prompt-tokens 1000-2000 --output-tokens 200
      specsim plan --workload azure.csv --slo ttft=200ms,tpot=20ms
      specsim plan --workload chats.json --concurrency 32 --vllm-file spec.json
      specsim plan --profile server.json --goodput-file goodput.json
    """
    given = flat(locals())
    from tqdm.auto import tqdm

    from specsim.simulator.candidates import candidates
    from specsim.simulator.plan import plan as make
    from specsim.simulator.plan import policy_metrics

    files.check()
    check_traffic(given)
    planned = cell(given | trace_fields(traffic))
    check_times(given, planned)
    goal = slos.goal(require_int("replicates", replicates))
    configs = candidates(planned)
    with tqdm(total=len(configs) * replicates, unit="run", disable=None) as bar:
        found = make(planned, objective, configs, replicates, bar.update, goal and goal.slo)
    rates = None if goal is None else highest_rates(planned, configs, goal)
    limit = load.max_running if found.crossover is None else found.crossover - 1  # at the crossover plain is best
    compared = policy_metrics(planned, limit) if policies else {}
    contents = files.contents(found, draft)
    usage = files.usage(found, draft)

    def print_all(console: "Console") -> None:
        show(found, draft, describe_acceptance(given, planned), console)
        show_slo(found, rates, console)
        for line in usage:
            console.print()
            console.print(line, soft_wrap=True)
        if compared:
            show_policies(compared, console)

    value = found.to_json(draft) | {"policies": compared, "highest_rates": rates and plain_values(rates)}
    try:
        options.report("plan", print_all, value, json_file)
    finally:
        files.write(contents)


def show(found: "Plan", draft: str, acceptance: str, console: "Console") -> None:
    """Print the candidates, the choice by batch size, and flags; acceptance: a sentence on what was assumed of it."""
    from specsim.core.display import heading, paragraph, short_setting
    from specsim.simulator.candidates import sglang_flags, vllm_flags

    load = found.cell
    where = f"{load.model} on {load.tensor_parallel} × {load.hardware}, {describe_load(load)}"
    heading(console, f"{where}: best for {found.objective}")
    show_candidates(found, console)
    show_workload(load, console)
    for text in (_method(found), acceptance):
        console.print()
        paragraph(console, text)
    show_limits(found, console)
    heading(console, "by batch size")
    show_batches(found, console)
    show_chains(found, console)
    heading(console, f"SGLang: {short_setting(found.best.config)}")
    flags = sglang_flags(load, found.best.config, draft)
    console.print(flags or f"SGLang has no drafter of kind {load.drafter}.", soft_wrap=True)
    if found.best_chain is not None:
        heading(console, f"vLLM (chains only): {short_setting(found.best_chain.config)}")
        console.print(vllm_flags(load, found.best_chain.config, draft), soft_wrap=True)


def show_candidates(found: "Plan", console: "Console") -> None:
    """Print the best candidates with their regret, and with objectives their goodput."""
    from specsim.core.display import figure, paragraph, print_table, short_setting
    from specsim.simulator.slo import ATTAINMENT, GOODPUT

    figures = {"tok/s": ("Output Throughput (tok/s)", 0)}
    times = {"TTFT ms": ("Mean TTFT (ms)", 1), "TPOT ms": ("Mean TPOT (ms)", 2), "P99 ITL ms": ("P99 ITL (ms)", 1)}
    if found.slo is not None:  # whose bounds are on the other times
        figures = {"good/s": (GOODPUT, 2), "good %": (ATTAINMENT, 1)}
        del times["P99 ITL ms"]
    rows = [
        (
            short_setting(each.config),
            figure(each.accept_length),
            *(figure(each.metrics[name], digits) for name, digits in figures.values()),
            *_over_plain(found, each),
            *(figure(each.metrics[name], digits) for name, digits in times.values()),
            f"{each.regret:.1%}" + ("" if each.spread is None else f" ± {each.spread:.1%}"),
        )
        for each in found.candidates[:SHOWN]
    ]
    headings = ("setting", "accepts", *figures, "over plain", "90% band", *times, "regret")
    print_table(console, headings, rows)
    if len(found.candidates) > SHOWN:
        paragraph(console, f"and {len(found.candidates) - SHOWN} more, none of them better.")


def _over_plain(found: "Plan", row: "Candidate") -> tuple[str, str]:
    """Make the cells of a speed-up and its band."""
    if found.plain is None or row.config.is_plain:
        return ("1.00 ×" if found.plain else "-", "-")
    speedup = found.over_plain(row)
    if not 0 < speedup < math.inf:
        return "-", "-"
    low, high = found.band(row)
    return f"{speedup:.2f} ×", f"{low:.2f} to {high:.2f}"


def _method(found: "Plan") -> str:
    """Say what the figures of the candidates are."""
    from specsim.simulator.replicates import CHANCE, CONFIDENCE, EQUAL
    from specsim.simulator.scenario import calibration

    loss = {
        "throughput": "time for the same tokens over that of the quickest setting",
        "latency": "mean latency over the lowest of all",
        "goodput": "time for the same requests within the objectives over that of the quickest setting",
    }[found.objective]
    spread = f", ± its {CONFIDENCE:.0%} confidence interval" if found.replicates > 1 else ""
    schedule = found.cell.plain_schedule
    plain = f" Plain decoding runs under schedule {schedule}." if schedule not in (None, found.cell.schedule) else ""
    words = calibration(found.cell.serving(found.cell.option(found.best.config)))
    requests = f"{found.replicates} × {len(found.cell.workload):,} requests"
    return (
        f"{words[0].upper()}{words[1:]}: means of {requests}, the same for every "
        f"setting.{plain} Regret: additional {loss}{spread}. Settings within {EQUAL:.0%}, or within that interval and "
        f"{CHANCE:.0%}, count as equal and come first, the cheapest (fewest draft tokens, then steps) at the top."
    )


def show_limits(found: "Plan", console: "Console") -> None:
    """Say which settings were not tried though the best one may be among them."""
    from specsim.core.display import paragraph
    from specsim.simulator.candidates import why_no_trees

    if why := why_no_trees(found.cell):
        console.print()
        paragraph(console, f"No trees were tried: {why}.")
    if not found.limits:
        return
    names = {"topk": "topk", "num_steps": "steps", "num_draft_tokens": "draft tokens"}
    best = found.best.config
    most = ", ".join(f"{names[name]} {value}" for name, value in found.limits.items())
    varied = [f"--vary {name}={value},{value + 1},{2 * value}" for name, value in found.limits.items()]
    fixed = [f"--{name.replace('_', '-')} {getattr(best, name)}" for name in names if name not in found.limits]
    console.print()
    paragraph(
        console,
        f"The best setting lies on the edge of what was tried ({most}): more may be better. Deeper drafts need their "
        "acceptance (--acceptance, or --accept-rates for chains), wider trees more ranks. Try with the same load:",
    )
    command = ["specsim sweep --out cells.sqlite", *varied, *(fixed if best.topk > 1 else [])]
    console.print(" ".join(command), soft_wrap=True)


def show_batches(found: "Plan", console: "Console") -> None:
    """Print the best setting for servers that always hold equally many requests."""
    from specsim.core.display import figure, paragraph, print_table, short_setting

    rows = [
        (
            str(each.batch),
            short_setting(each.config),
            figure(each.tokens_per_s, 0),
            f"{each.speedup:.2f} ×",
            f"{each.span[0]:.2f} to {each.span[1]:.2f}",
            "simulated, as above" if each.is_simulated else "computed",
        )
        for each in found.by_batch
    ]
    print_table(console, ("requests", "setting", "tok/s", "over plain", "90% band", ""), rows)
    console.print()
    paragraph(
        console,
        "Computed: a server that always holds this number of requests of mean length; each finished request is "
        "replaced. Prompts are included, the run's beginning and end are not. Band: it holds 90% of speed-ups, by the "
        "uncertainty of the profile and of the model.",
    )


def show_policies(compared: dict[str, dict[str, float]], console: "Console") -> None:
    """Print the metrics of policies that choose a chain for every round."""
    from specsim.core.display import figure, heading, print_table

    names = ("Output Throughput (tok/s)", "Mean E2E Latency (ms)", "P99 ITL (ms)")
    heading(console, "policies that choose a chain for every round, on equal traces")
    rows = [(name, *(figure(metrics[each], 1) for each in names)) for name, metrics in compared.items()]
    print_table(console, ("policy", "tok/s", "E2E ms", "P99 ITL ms"), rows)
