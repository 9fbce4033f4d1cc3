"""specsim plan: the best setting for a model, hardware and load."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from specsim.cli.option_fields import common, option
from specsim.cli.options import report
from specsim.cli.plan_options import EngineFileOptions, SloOptions, highest_rates, plain_values, show_chains, show_slo
from specsim.cli.server_options import ServerOptions, describe_load, show_workload

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.plan import Candidate, SettingPlan

SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ServerOptions, SloOptions, EngineFileOptions):
    """Options of specsim plan."""

    # Figure to optimise.
    objective: Annotated[
        Literal["throughput", "latency", "goodput"] | None,
        common("Search", default="throughput; latency with --rate; goodput with --slo"),
    ] = None
    # Also compare policies that choose the number of drafts in every round.
    policies: Annotated[bool, option("Search")] = False
    # Drafter's path or hub id in the printed flags of SGLang and vLLM.
    draft: Annotated[str, option("Output", values="NAME")] = "DRAFT_MODEL"


def plan(options: PlanOptions) -> None:
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
    from tqdm.auto import tqdm

    from specsim.simulator.candidates import candidates
    from specsim.simulator.plan import plan as make

    options.check_files()
    options.check_load()
    planned = options.cell(shares=options.assumed().shares)
    options.check_times(planned)
    goal = options.goal()
    configs = candidates(planned)
    with tqdm(total=len(configs) * options.replicates, unit="run", disable=None) as bar:
        best_plan = make(planned, options.objective, configs, options.replicates, bar.update, goal and goal.slo)
    rates = None if goal is None else highest_rates(planned, configs, goal)
    # At the crossover plain is best.
    limit = options.max_running if best_plan.crossover is None else best_plan.crossover - 1
    compared = {}
    if options.policies:
        from specsim.simulator.policy_comparison import policy_metrics

        compared = policy_metrics(planned, limit)
    contents = options.contents(best_plan, options.draft)
    usage = options.usage(best_plan, options.draft)

    def print_all(console: "Console") -> None:
        show(best_plan, options.draft, options.describe_acceptance(planned), console)
        show_slo(best_plan, rates, console)
        for line in usage:
            console.print()
            console.print(line, soft_wrap=True)
        if compared:
            show_policies(compared, console)

    value = {"policies": compared, "highest_rates": rates and plain_values(rates)}
    if options.json is not None:  # bands of all candidates take time
        value = best_plan.to_json(options.draft) | value
    try:
        report("plan", print_all, value, options.json)
    finally:
        options.write_files(contents)


def show(best_plan: "SettingPlan", draft: str, acceptance: str, console: "Console") -> None:
    """Print the candidates, the choice by batch size, and flags; acceptance: a sentence on what was assumed of it."""
    from specsim.core.display import heading, paragraph, short_setting
    from specsim.simulator.candidates import sglang_flags, vllm_flags

    load = best_plan.cell
    where = f"{load.model} on {load.tensor_parallel} × {load.hardware}, {describe_load(load)}"
    heading(console, f"{where}: best for {best_plan.objective}")
    show_candidates(best_plan, console)
    show_workload(load, console)
    for text in (_method(best_plan), acceptance):
        console.print()
        paragraph(console, text)
    show_limits(best_plan, console)
    heading(console, "by batch size")
    show_batches(best_plan, console)
    show_chains(best_plan, console)
    heading(console, f"SGLang: {short_setting(best_plan.best.config)}")
    flags = sglang_flags(load, best_plan.best.config, draft)
    console.print(flags or f"SGLang has no drafter of kind {load.drafter}.", soft_wrap=True)
    if best_plan.best_chain is not None:
        heading(console, f"vLLM (chains only): {short_setting(best_plan.best_chain.config)}")
        console.print(vllm_flags(load, best_plan.best_chain.config, draft), soft_wrap=True)


def show_candidates(best_plan: "SettingPlan", console: "Console") -> None:
    """Print the best candidates with their regret, and with objectives their goodput."""
    from specsim.core.display import figure, paragraph, print_table, short_setting
    from specsim.simulator.results import ATTAINMENT, GOODPUT

    figures = {"tok/s": ("Output Throughput (tok/s)", 0)}
    times = {"TTFT ms": ("Mean TTFT (ms)", 1), "TPOT ms": ("Mean TPOT (ms)", 2), "P99 ITL ms": ("P99 ITL (ms)", 1)}
    if best_plan.slo is not None:  # whose bounds are on the other times
        figures = {"good/s": (GOODPUT, 2), "good %": (ATTAINMENT, 1)}
        del times["P99 ITL ms"]
    rows = [
        (
            short_setting(candidate.config),
            figure(candidate.accept_length),
            *(figure(candidate.metrics[name], digits) for name, digits in figures.values()),
            *_over_plain(best_plan, candidate),
            *(figure(candidate.metrics[name], digits) for name, digits in times.values()),
            f"{candidate.regret:.1%}" + ("" if candidate.spread is None else f" ± {candidate.spread:.1%}"),
        )
        for candidate in best_plan.candidates[:SHOWN]
    ]
    headings = ("setting", "accepts", *figures, "over plain", "90% band", *times, "regret")
    print_table(console, headings, rows)
    if len(best_plan.candidates) > SHOWN:
        paragraph(console, f"and {len(best_plan.candidates) - SHOWN} more, none of them better.")


def _over_plain(best_plan: "SettingPlan", row: "Candidate") -> tuple[str, str]:
    """Make the cells of a speed-up and its band."""
    if best_plan.plain is None or row.config.is_plain:
        return ("1.00 ×" if best_plan.plain else "-", "-")
    speedup = best_plan.over_plain(row)
    if not 0 < speedup < math.inf:
        return "-", "-"
    low, high = best_plan.band(row)
    return f"{speedup:.2f} ×", f"{low:.2f} to {high:.2f}"


def _method(best_plan: "SettingPlan") -> str:
    """Say what the figures of the candidates are."""
    from specsim.simulator.candidates import CHANCE, CONFIDENCE, EQUAL
    from specsim.simulator.scenario import calibration

    loss = {
        "throughput": "time for the same tokens over that of the quickest setting",
        "latency": "mean latency over the lowest of all",
        "goodput": "time for the same requests within the objectives over that of the quickest setting",
    }[best_plan.objective]
    spread = f", ± its {CONFIDENCE:.0%} confidence interval" if best_plan.replicates > 1 else ""
    schedule = best_plan.cell.plain_schedule
    plain = (
        f" Plain decoding runs under schedule {schedule}." if schedule not in (None, best_plan.cell.schedule) else ""
    )
    words = calibration(best_plan.cell.serving(best_plan.cell.option(best_plan.best.config)))
    requests = f"{best_plan.replicates} × {len(best_plan.cell.workload):,} requests"
    return (
        f"{words[0].upper()}{words[1:]}: means of {requests}, the same for every "
        f"setting.{plain} Regret: additional {loss}{spread}. Settings within {EQUAL:.0%}, or within that interval and "
        f"{CHANCE:.0%}, count as equal and come first, the cheapest (fewest draft tokens, then steps) at the top."
    )


def show_limits(best_plan: "SettingPlan", console: "Console") -> None:
    """Say which settings were not tried though the best one may be among them."""
    from specsim.core.display import paragraph
    from specsim.simulator.candidates import why_no_trees

    if why := why_no_trees(best_plan.cell):
        console.print()
        paragraph(console, f"No trees were tried: {why}.")
    if not best_plan.limits:
        return
    names = {"topk": "topk", "num_steps": "steps", "num_draft_tokens": "draft tokens"}
    best = best_plan.best.config
    most = ", ".join(f"{names[name]} {value}" for name, value in best_plan.limits.items())
    varied = [f"--vary {name}={value},{value + 1},{2 * value}" for name, value in best_plan.limits.items()]
    fixed = [f"--{name.replace('_', '-')} {getattr(best, name)}" for name in names if name not in best_plan.limits]
    console.print()
    paragraph(
        console,
        f"The best setting lies on the edge of what was tried ({most}): more may be better. Deeper drafts need their "
        "acceptance (--acceptance, or --accept-rates for chains), wider trees more ranks. Try with the same load:",
    )
    command = ["specsim sweep --out cells.sqlite", *varied, *(fixed if best.topk > 1 else [])]
    console.print(" ".join(command), soft_wrap=True)


def show_batches(best_plan: "SettingPlan", console: "Console") -> None:
    """Print the best setting for servers that always hold equally many requests."""
    from specsim.core.display import figure, paragraph, print_table, short_setting

    rows = [
        (
            str(choice.batch),
            short_setting(choice.config),
            figure(choice.tokens_per_s, 0),
            f"{choice.speedup:.2f} ×",
            f"{choice.span[0]:.2f} to {choice.span[1]:.2f}",
            "simulated, as above" if choice.is_simulated else "computed",
        )
        for choice in best_plan.by_batch
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
    rows = [(name, *(figure(metrics[figure_name], 1) for figure_name in names)) for name, metrics in compared.items()]
    print_table(console, ("policy", "tok/s", "E2E ms", "P99 ITL ms"), rows)
