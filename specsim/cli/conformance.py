"""specsim conformance: kernels of a third party against the contract."""

import sys
from typing import Annotated

import typer

from specsim.cli import options


def conformance(
    module: Annotated[str, typer.Option(help="Its functions are run.", metavar="NAME|FILE.py")],
    ops: Annotated[
        str | None, typer.Option(help="Only these operations.", metavar="A,B,...", show_default="all it has")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where they run.", metavar="cpu|cuda", show_default="a GPU if there is one")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Run a module's kernels against the contract's cases.

    Exit status 1: not equal.
    """
    given = locals()
    from specsim.core.engine_options import check_device
    from specsim.core.files import check_writable
    from specsim.core.provenance import now, versions
    from specsim.correctness.conformance.report import Report

    check_writable(json_file)
    line = options.command(conformance, given)
    device = check_device(device)
    used = versions(device)  # before a kernel can break the GPU, which then does not say its name
    report = Report.of(module, None if ops is None else ops.split(","), device, _show_progress)
    value = {"command": line, "date": now(), "versions": used} | report.to_json()
    options.report(report.show, value, json_file, not report.failures)


def _show_progress(done: int, cases: int) -> None:
    """Overwrite a progress line, on a terminal."""
    if sys.stderr.isatty():
        end = "\r" if done + 1 < cases else "\n"
        print(f"case {done + 1} of {cases}", file=sys.stderr, end=end, flush=True)
