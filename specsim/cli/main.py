"""The command line: its commands, and its sentences for errors."""

import os
import sys
import tempfile
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, NoReturn

import typer

from specsim import __version__
from specsim.cli.accept import accept
from specsim.cli.bench import bench
from specsim.cli.calibrate import calibrate
from specsim.cli.certify import certify
from specsim.cli.conformance import conformance
from specsim.cli.convert import convert
from specsim.cli.demo import demo
from specsim.cli.diff import diff
from specsim.cli.explain import explain
from specsim.cli.faults import faults
from specsim.cli.generate import generate
from specsim.cli.help import CommandHelp, GenerateHelp, ProgramHelp
from specsim.cli.lint_report import lint_report
from specsim.cli.plan import plan
from specsim.cli.predict import predict
from specsim.cli.run import run
from specsim.cli.sampling_test import sampling_test
from specsim.cli.schema import schema
from specsim.cli.simulate import simulate
from specsim.cli.soak import soak
from specsim.cli.sweep import sweep
from specsim.cli.train import train
from specsim.core.errors import InputError, tell
from specsim.core.files import Unwritten, write_whole

# Commands of models so small that threads only wait for each other; libraries read the number when they are loaded.
SMALL = {"demo", "train", "soak", "accept", "diff", "certify", "conformance", "sampling-test", "predict"}
# The usage error of typer's own click, which typer does not export.
_UsageError: type[Exception] = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "UsageError")
_KINDS = {"integer": "an integer", "int": "an integer", "number": "a number", "float": "a number"}
_COMPLETION = "_SPECSIM_COMPLETE"
_INTERRUPTED = 130
_UNREAD = 141
app = typer.Typer(
    cls=ProgramHelp,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; its help lists the exit statuses.

    Where nobody reads on (`| head`) it is 141, which a shell reports of a program that SIGPIPE ends.
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process lives
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            status = app(arguments, prog_name="specsim", standalone_mode=False)
        finally:
            sys.stdout.flush()
        if status == _INTERRUPTED:
            tell("interrupted")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own end of a program whose output nobody reads
            _end_unread()
        is_completion = _COMPLETION in os.environ  # a shell's question, which typer answers and ends
        if not end.code and not is_completion:  # no command ends like that, so it is not done
            _fail("code that this command ran has called exit(); let it return or raise an error")
        raise
    except InputError as error:
        _fail(error)
    except _UsageError as error:
        _fail(_sentence(error, sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        _end_unread()
    except OSError as error:
        if error.filename is None:
            _discard_stdout()
        file = str(error.filename or "standard output")
        _fail(InputError(file, error.strerror, "a file that can be read or written, with room for what is written"))
    except RuntimeError as error:
        if not any(text in str(error) for text in ("allocate memory", "out of memory")):
            raise
        _fail("not enough memory for this setting; use smaller pages, trees, batches or lengths")
    sys.exit(status or 0)


def _sentence(error: Any, words: Sequence[str]) -> InputError | str:
    """Phrase a usage error, as an InputError where the value of an option has another type."""
    names = getattr(getattr(error, "param", None), "opts", ())
    values = [after for before, after in pairwise(words) if before in names]
    values += [value for name, _, value in (word.partition("=") for word in words) if name in names and value]
    kinds = [kind for word, kind in _KINDS.items() if f"valid {word}" in error.message]
    if values and kinds:
        return InputError(error.param.name, values[-1], kinds[0])
    return " ".join(error.format_message().split())


def _fail(error: InputError | str) -> NoReturn:
    if not isinstance(error, Unwritten):
        tell(error)
    _rescue_results()
    sys.exit(2)


def _rescue_results() -> None:
    """Tell each result that could not be written before this error, and its new place."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, Unwritten):
            tell(f"{error}; {_put_elsewhere(error)}")
        error = error.__context__


def _put_elsewhere(lost: Unwritten) -> str:
    """Write a result to a temporary file, or JSON to standard output where that fails too, and say so."""
    try:
        file = Path(tempfile.gettempdir(), f"specsim-{token_hex(8)}{Path(str(lost.value)).suffix}")
        write_whole(file, lost.data, lost.name)
        return f"the result is in {file}"
    except (OSError, Unwritten):
        if not lost.data.startswith(b"{"):
            return "the result is lost, as no temporary file can be written either"
    try:
        print(lost.data.decode(), end="", flush=True)
        return "the result is printed on standard output"
    except OSError:
        _discard_stdout()
        return "the result is lost, as neither a temporary file nor standard output can be written"


def _end_unread() -> NoReturn:
    _discard_stdout()
    _rescue_results()
    sys.exit(_UNREAD)


def _discard_stdout() -> None:
    """Drop buffered output, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        print("specsim", __version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def specsim(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative decoding with token trees (EAGLE-1, EAGLE-2, EAGLE-3).

    Every command explains itself: specsim COMMAND --help.

    Exit status: 0 when done, 1 if a check fails, 2 for bad input, 130 after
    Ctrl-C, 141 after a closed pipe.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    if context.invoked_subcommand in SMALL:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")


COMMANDS = {
    "Run": (generate, run, train, convert),
    "Check": (diff, certify, sampling_test, soak, conformance, faults, explain, lint_report),
    "Measure": (bench, accept, predict),
    "Simulate": (simulate, plan, sweep, calibrate),
    "Learn": (demo, schema),
}
for group, commands in COMMANDS.items():
    for command in commands:
        layout = GenerateHelp if command is generate else CommandHelp
        app.command(cls=layout, rich_help_panel=group)(command)
