"""specsim calibrate: a server's profile from the files of its benchmarks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli import options
from specsim.cli import server_options as server
from specsim.cli.file_options import reads, writes
from specsim.cli.options import option
from specsim.core.errors import InputError, require_choice
from specsim.core.kinds import DEFAULT, KINDS, SERVED

if TYPE_CHECKING:
    from rich.console import Console

DRAFTERS = tuple(name for name in SERVED if not KINDS[name].is_parallel)


def calibrate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results of vLLM's or SGLang's benchmarks in JSON, or tables in CSV.",
            metavar="FILE...",
            rich_help_panel="Report",
            show_default=False,
            callback=reads,
        ),
    ] = None,
    published: Annotated[
        bool,
        option("Published table", "Calibrate on six cells of every published table instead.", "--published"),
    ] = False,
    model: server.Model = "llama-3.1-8b",
    hardware: server.Hardware = "H100-SXM",
    tensor_parallel: server.TensorParallel = 1,
    drafter: Annotated[str, option("Model", "Drafter architecture.", metavar="|".join(DRAFTERS))] = DEFAULT,
    draft_vocab: server.DraftVocab = 32000,
    topk: options.Topk = 1,
    num_steps: Annotated[
        int | None,
        option(
            "Draft tree",
            "Draft steps of files that do not contain them; 0 without drafts. [at least 0]",
            show_default="none",
        ),
    ] = None,
    num_draft_tokens: options.NumDraftTokens = None,
    batch: Annotated[
        int | None,
        option("Load", "Requests in flight, of files that do not contain them. [at least 1]", show_default="none"),
    ] = None,
    prompt_tokens: Annotated[
        int | None, option("Load", "Mean prompt length of such files. [at least 1]", show_default="none")
    ] = None,
    output_tokens: Annotated[
        int | None, option("Load", "Mean output length of such files. [at least 1]", show_default="none")
    ] = None,
    name: Annotated[str, option("Output", "Name of the profile.", metavar="NAME")] = "calibrated",
    out: Annotated[
        Path | None,
        option("Output", "Write the profile to this file.", metavar="FILE", show_default=False, callback=writes),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Calibrate the simulator on your benchmark files.

    Fits what the measured cells determine and writes a profile for simulate, plan and sweep.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim calibrate serve-*.json --hardware H200 --out server.json
      specsim calibrate table.csv --prompt-tokens 512 --output-tokens 256
      specsim calibrate --published
    """
    from specsim.core.files import write_json

    paths = list(files or ())
    if published == bool(paths):
        raise InputError("file", ", ".join(map(str, paths)) or "none", "benchmark files, or --published without any")
    if published:
        _published(json_file)
        return
    require_choice("drafter", drafter, DRAFTERS)
    from specsim.simulator import hardware as gpus
    from specsim.simulator import model as models
    from specsim.simulator.calibration.benchmark_file import Context
    from specsim.simulator.calibration.server_fit import fit_server, read_files, show
    from specsim.simulator.cost import CostModel
    from specsim.simulator.drafter import drafter as drafters

    target = models(model)
    head = drafters(drafter, target, draft_vocab)
    cost = CostModel(gpus(hardware), target, head, tensor_parallel=tensor_parallel)
    context = Context(num_steps, topk, num_draft_tokens, batch, prompt_tokens, output_tokens)
    sources, cells = read_files(paths, context)
    fit = fit_server(cost, cells, sources, name, drafter)

    def print_all(console: "Console") -> None:
        show(fit, console)
        write_json(out, fit.profile.to_json(), "out")
        if out is not None:
            console.print(f"\nThe profile is in {out}: specsim plan --profile {out}", soft_wrap=True)

    options.report("calibrate", print_all, fit.to_json(), json_file)


def _published(json_file: Path | None) -> None:
    from specsim.simulator.calibration.published_report import report, show

    fit_report = report()
    options.report("calibrate-published", lambda console: show(fit_report, console), fit_report.to_json(), json_file)
