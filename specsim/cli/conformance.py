"""specsim conformance: kernels of a third party against the contract."""

import sys
from typing import Annotated

from specsim.cli import options
from specsim.cli.file_options import reads
from specsim.cli.options import option


def conformance(
    module: Annotated[
        str,
        option("Kernels", "Python module or file whose functions are checked.", metavar="NAME|FILE.py", callback=reads),
    ],
    ops: Annotated[
        str | None,
        option("Kernels", "Operations to check.", metavar="A,B,...", show_default="all that the module defines"),
    ] = None,
    device: Annotated[
        str | None,
        option(
            "Execution",
            "Device that the kernels run on.",
            metavar="cpu|cuda",
            show_default="cuda if there is a GPU, else cpu",
        ),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Check your kernels against the operations' contract.

    The kernels are functions of one module, named like the operations.

    Exit status: 0 if all results are equal, 1 if one is not, 2 for bad input.

    Examples:
      specsim conformance --module my_kernels.py
      specsim conformance --module my_kernels.py --ops build_tree,verify_greedy
    """
    arguments = locals()
    from specsim.core.engine_options import check_device
    from specsim.core.provenance import now, versions
    from specsim.correctness.conformance.report import ConformanceReport

    line = options.command(conformance, arguments)
    device = check_device(device)
    used = versions(device)  # before a kernel can break the GPU, which then does not say its name
    report = ConformanceReport.of(module, None if ops is None else ops.split(","), device, _show_progress)
    value = {"command": line, "date": now(), "versions": used} | report.to_json()
    options.report("conformance", report.show, value, json_file, not report.failures)


def _show_progress(done: int, cases: int) -> None:
    """Overwrite a progress line, on a terminal."""
    if sys.stderr.isatty():
        end = "\r" if done + 1 < cases else "\n"
        print(f"case {done + 1} of {cases}", file=sys.stderr, end=end, flush=True)
