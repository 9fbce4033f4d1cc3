"""specsim calibrate: a server's profile from the files of its benchmarks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specsim.cli.option_fields import common
from specsim.cli.options import DraftTreeOptions, JsonOptions, report
from specsim.cli.server_options import GpuOptions
from specsim.core.errors import InputError
from specsim.core.kinds import DEFAULT, KINDS, SERVED
from specsim.core.limits import BatchSize, StepCount

if TYPE_CHECKING:
    from rich.console import Console

DRAFTERS = tuple(name for name in SERVED if not KINDS[name].is_parallel)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(GpuOptions, DraftTreeOptions, JsonOptions):
    """Options of specsim calibrate."""

    # Results of benchmarks of vLLM, SGLang, GuideLLM, AIPerf or TensorRT-LLM, or tables in CSV.
    files: Annotated[list[Path] | None, common("Report", values="FILE...", is_argument=True, file="reads")] = None
    # Calibrate on six cells of every published table instead.
    published: Annotated[bool, common("Published table")] = False
    # Shipped name, hub id of a shipped shape, or a config.json.
    model: Annotated[str, common("Model", file="reads")] = "llama-3.1-8b"
    # Drafter architecture.
    drafter: Annotated[str, common("Model", choices=DRAFTERS)] = DEFAULT
    # Draft steps of files that do not contain them; 0 without drafts.
    num_steps: Annotated[StepCount | None, common("Draft tree", default="none")] = None  # pyright: ignore[reportIncompatibleVariableOverride] - files contain it
    # Requests in flight, of files that do not contain them.
    batch: Annotated[BatchSize | None, common("Load", default="none")] = None
    # Mean prompt length of such files.
    prompt_tokens: Annotated[int | None, common("Load", at_least=1, default="none")] = None
    # Mean output length of such files.
    output_tokens: Annotated[int | None, common("Load", at_least=1, default="none")] = None
    # Name of the profile.
    name: Annotated[str, common("Output", values="NAME")] = "calibrated"
    # Write the profile to this file.
    out: Annotated[Path | None, common("Output", file="writes")] = None


def calibrate(options: CalibrateOptions) -> None:
    """Calibrate the simulator on your benchmark files.

    Fits what the measured cells determine and writes a profile for simulate, plan and sweep.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim calibrate serve-*.json --hardware H200 --out server.json
      specsim calibrate table.csv --prompt-tokens 512 --output-tokens 256
      specsim calibrate --published
    """
    from specsim.core.files import write_json

    paths = options.files or []
    if options.published == bool(paths):
        names = ", ".join(map(str, paths)) or "none"
        raise InputError("file", names, "benchmark files, or --published without any")
    if options.published:
        _published(options.json)
        return
    from specsim.simulator import hardware as gpus
    from specsim.simulator import model as models
    from specsim.simulator.calibration.benchmark_file import Context
    from specsim.simulator.calibration.server_fit import fit_server, read_files, show
    from specsim.simulator.cost import CostModel
    from specsim.simulator.drafter import drafter as drafters
    from specsim.simulator.drafter import trained_vocabulary

    target = models(options.model)
    head = drafters(options.drafter, target, trained_vocabulary(options.drafter, options.draft_vocab))
    cost = CostModel(gpus(options.hardware), target, head, tensor_parallel=options.tensor_parallel)
    names = ("num_steps", "topk", "num_draft_tokens", "batch", "prompt_tokens", "output_tokens")
    sources, cells = read_files(paths, Context(**{name: getattr(options, name) for name in names}))
    fit = fit_server(cost, cells, sources, options.name, options.drafter)
    out = options.out

    def print_all(console: "Console") -> None:
        show(fit, console)
        write_json(out, fit.profile.to_json(), "out")
        if out is not None:
            console.print(f"\nThe profile is in {out}: specsim plan --profile {out}", soft_wrap=True)

    report("calibrate", print_all, fit.to_json(), options.json)


def _published(file: Path | None) -> None:
    from specsim.simulator.calibration import published_report

    fit_report = published_report.report()
    show = published_report.show
    report("calibrate-published", lambda console: show(fit_report, console), fit_report.to_json(), file)
