"""The command line: what runs the commands of specsim.commands, and what comes of errors."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from specsim.commands.accept import accept
from specsim.commands.bench import bench
from specsim.commands.certify import certify
from specsim.commands.conformance import conformance
from specsim.commands.demo import demo
from specsim.commands.diff import diff
from specsim.commands.explain import explain
from specsim.commands.faults import faults
from specsim.commands.generate import generate
from specsim.commands.laws import laws
from specsim.commands.lint_report import lint_report
from specsim.commands.plan import plan
from specsim.commands.predict import predict
from specsim.commands.run import run
from specsim.commands.simulate import simulate
from specsim.commands.soak import soak
from specsim.commands.sweep import sweep
from specsim.config import InputError

# What runs models so small that threads only wait for each other; libraries read the number when they are loaded.
SMALL = {"demo", "soak", "accept", "diff", "certify", "conformance", "laws", "predict"}
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Exit status: 1 where an equality fails, 2 for bad input, 130 when interrupted."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by whoever started this program
    sys.stdout.reconfigure(errors="replace")
    try:
        try:
            app(arguments, prog_name="specsim")
        finally:
            sys.stdout.flush()
    except InputError as error:
        _fail(error)
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            _discard_stdout()
        _fail(InputError(str(error.filename or "standard output"), error.strerror, "what can be read or written"))
    except RuntimeError as error:
        if not any(text in str(error) for text in ("allocate memory", "out of memory")):
            raise
        _fail(InputError("the memory of this setting", "more than there is", "smaller pages, trees or lengths"))


def _fail(error: InputError) -> None:
    print(f"specsim: {error}", file=sys.stderr)
    sys.exit(2)


def _discard_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print("specsim", version("specsim"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def specsim(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative decoding with token trees (EAGLE-1, EAGLE-2, EAGLE-3)."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    if context.invoked_subcommand in SMALL:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")


COMMANDS = (
    demo,
    generate,
    run,
    soak,
    accept,
    diff,
    bench,
    certify,
    conformance,
    explain,
    faults,
    laws,
    lint_report,
    simulate,
    predict,
    plan,
    sweep,
)
for command in COMMANDS:
    app.command()(command)
