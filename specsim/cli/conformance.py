"""specsim conformance: kernels of a third party against the contract."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from specsim.cli.option_fields import command_line, common
from specsim.cli.options import DeviceOptions, JsonOptions, report
from specsim.core.errors import InputError, printable
from specsim.core.user_module import CALL_SECONDS


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions(DeviceOptions, JsonOptions):
    """Options of specsim conformance."""

    # Python module or file whose functions are checked.
    module: Annotated[str, common("Kernels", values="NAME|FILE.py", file="reads")]
    # Operations to check.
    ops: Annotated[str | None, common("Kernels", values="A,B,...", default="all that the module defines")] = None
    # Run only the case of this name; another name lists all.
    case: Annotated[str | None, common("Kernels", values="NAME", default="all of the operations")] = None
    # Seconds after which a call is ended.
    time_limit: Annotated[float, common("Execution", at_least=0.1, at_most=86400)] = CALL_SECONDS
    # Write each failed case to this folder, as a Python script that runs alone.
    dump: Annotated[Path | None, common("Output", values="FOLDER", file="folder")] = None
    # Device that the kernels run on.
    device: Literal["cpu", "cuda"] | None = None


def conformance(options: ConformanceOptions) -> None:
    """Check your kernels against the operations' contract.

    The kernels are functions of one module, named like the operations.

    Exit status: 0 if all results are equal, 1 if one is not, 2 for bad input.

    Examples:
      specsim conformance --module my_kernels.py
      specsim conformance --module my_kernels.py --ops build_tree,verify_greedy
      specsim conformance --module mine.py --case "shift_ids: no requests"
      specsim conformance --module mine.py --dump failed
    """
    from specsim.core.engine_options import check_device
    from specsim.core.provenance import now, versions
    from specsim.correctness.conformance.report import CaseSettings, ConformanceReport
    from specsim.correctness.conformance.runner import CASES

    device = check_device(options.device)
    used = versions(device)  # before a kernel can break the GPU, which then does not say its name
    ops = None if options.ops is None else options.ops.split(",")
    settings = CaseSettings(options.case, options.time_limit, options.dump)
    progress = partial(_show_progress, options.time_limit)
    try:
        result = ConformanceReport.of(options.module, ops, device, progress, settings)
    except InputError as error:
        if error.name == "case":
            print(*(case.id for case in CASES if ops is None or case.operation in ops), sep="\n")
        raise
    value = {"command": command_line("conformance", options), "date": now(), "versions": used} | result.to_json()
    if options.dump is not None:
        print(f"{len(result.failures)} scripts of failed cases are in {printable(str(options.dump))}", file=sys.stderr)
    report("conformance", result.show, value, options.json, not result.failures)


def _show_progress(seconds: float, done: int, cases: int) -> None:
    """Print the limit of a call at the first case, and overwrite a progress line, on a terminal."""
    if not done:
        print(f"{cases} cases, each call ended after {seconds:g} seconds (--time-limit)", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        end = "\r" if done + 1 < cases else "\n"
        print(f"case {done + 1} of {cases}", file=sys.stderr, end=end, flush=True)
