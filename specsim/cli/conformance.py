"""specsim conformance: kernels of a third party against the contract."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from specsim.cli.option_fields import command_line, common
from specsim.cli.options import DeviceOptions, JsonOptions, report


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions(DeviceOptions, JsonOptions):
    """Options of specsim conformance."""

    # Python module or file whose functions are checked.
    module: Annotated[str, common("Kernels", values="NAME|FILE.py", file="reads")]
    # Operations to check.
    ops: Annotated[str | None, common("Kernels", values="A,B,...", default="all that the module defines")] = None
    # Device that the kernels run on.
    device: Literal["cpu", "cuda"] | None = None


def conformance(options: ConformanceOptions) -> None:
    """Check your kernels against the operations' contract.

    The kernels are functions of one module, named like the operations.

    Exit status: 0 if all results are equal, 1 if one is not, 2 for bad input.

    Examples:
      specsim conformance --module my_kernels.py
      specsim conformance --module my_kernels.py --ops build_tree,verify_greedy
    """
    from specsim.core.engine_options import check_device
    from specsim.core.provenance import now, versions
    from specsim.correctness.conformance.report import ConformanceReport

    device = check_device(options.device)
    used = versions(device)  # before a kernel can break the GPU, which then does not say its name
    ops = None if options.ops is None else options.ops.split(",")
    result = ConformanceReport.of(options.module, ops, device, _show_progress)
    value = {"command": command_line("conformance", options), "date": now(), "versions": used} | result.to_json()
    report("conformance", result.show, value, options.json, not result.failures)


def _show_progress(done: int, cases: int) -> None:
    """Overwrite a progress line, on a terminal."""
    if sys.stderr.isatty():
        end = "\r" if done + 1 < cases else "\n"
        print(f"case {done + 1} of {cases}", file=sys.stderr, end=end, flush=True)
