"""specsim plan: the best setting for a model, hardware and load."""

from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli import options
from specsim.cli.option_groups import flat, with_groups
from specsim.cli.server_options import LoadGroup, Seed, ServerGroup, cell

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.plan import Plan

SHOWN = 12


@with_groups
def plan(
    *,
    server: ServerGroup,
    load: LoadGroup,
    page_size: options.PageSize = 16,
    seed: Seed = 0,
    objective: Annotated[str, typer.Option(help="Figure to optimise.", metavar="throughput|latency")] = "throughput",
    policies: Annotated[bool, typer.Option("--policies", help="Compare policies, too.")] = False,
    draft: Annotated[str, typer.Option(help="Drafter's name in the flags.")] = "DRAFT_MODEL",
    json_file: options.JsonFile = None,
) -> None:
    """Find the best setting for a model, GPUs and a load, and print its flags."""
    given = flat(locals())
    from specsim.core.files import check_files
    from specsim.simulator.plan import plan as make
    from specsim.simulator.plan import policies as choose

    check_files({"accept": load.accept}, json=json_file)
    found = make(cell(given), objective)
    compared = choose(found.cell, found.crossover or load.max_running) if policies else {}
    value = found.to_json(draft) | {"policies": compared}
    options.report(lambda console: show(found, compared, draft, console), value, json_file)


def show(found: "Plan", compared: dict[str, dict[str, float]], draft: str, console: "Console") -> None:
    """Print the candidates with their regret, the choice by batch size, flags, and metrics of the compared policies."""
    from specsim.core.display import figure, heading, paragraph, print_table, short_setting
    from specsim.simulator.plan import sglang_flags, vllm_flags

    load = found.cell
    arrivals = f"{load.concurrency} clients" if load.rate is None else f"{load.rate:g} requests a second"
    where = f"{load.model} on {load.tensor_parallel} × {load.hardware}, {arrivals}"
    heading(console, f"{where}: best for {found.objective}")
    names = ("Output Throughput (tok/s)", "Mean TTFT (ms)", "Mean TPOT (ms)", "P99 ITL (ms)")
    rows = [
        (
            short_setting(each.config),
            figure(each.accept_length),
            *(figure(each.metrics[name], 0 if "tok/s" in name else 2) for name in names),
            f"{each.regret:.1%}",
        )
        for each in found.candidates[:SHOWN]
    ]
    print_table(console, ("setting", "accepts", "tok/s", "TTFT ms", "TPOT ms", "P99 ITL ms", "regret"), rows)
    if len(found.candidates) > SHOWN:
        paragraph(console, f"and {len(found.candidates) - SHOWN} more, none of them better.")
    heading(console, "by batch size")
    rows = [(str(each.batch), short_setting(each.config), f"{each.speedup:.2f} ×") for each in found.by_batch]
    print_table(console, ("requests", "setting", "over plain"), rows)
    heading(console, "SGLang")
    console.print(sglang_flags(load, found.best.config, draft), soft_wrap=True)
    if found.best_chain is not None:
        heading(console, "vLLM (chains)")
        console.print(vllm_flags(load, found.best_chain.config, draft), soft_wrap=True)
    if compared:
        names = ("Output Throughput (tok/s)", "Mean E2E Latency (ms)", "P99 ITL (ms)")
        heading(console, "policies that choose a chain for every round, on equal traces")
        rows = [(name, *(figure(metrics[each], 1) for each in names)) for name, metrics in compared.items()]
        print_table(console, ("policy", "tok/s", "E2E ms", "P99 ITL ms"), rows)
