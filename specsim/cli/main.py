"""The command line: its commands, and its sentences for errors."""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

import click
from click.shell_completion import get_completion_class, shell_complete

from specsim import __version__
from specsim.cli.accept import accept
from specsim.cli.bench import bench
from specsim.cli.calibrate import calibrate
from specsim.cli.certify import certify
from specsim.cli.command import Command, command_name, summary
from specsim.cli.conformance import conformance
from specsim.cli.convert import convert
from specsim.cli.demo import demo
from specsim.cli.diff import diff
from specsim.cli.explain import explain
from specsim.cli.faults import faults
from specsim.cli.generate import generate
from specsim.cli.help import write_rows, write_text
from specsim.cli.lint_report import lint_report
from specsim.cli.parity import parity
from specsim.cli.plan import plan
from specsim.cli.predict import predict
from specsim.cli.probe import probe
from specsim.cli.run import run
from specsim.cli.sampling_test import sampling_test
from specsim.cli.schema import schema
from specsim.cli.serve import serve
from specsim.cli.simulate import simulate
from specsim.cli.soak import soak
from specsim.cli.sweep import sweep
from specsim.cli.train import train
from specsim.core.children import PROCESS_LOST, ProcessLost
from specsim.core.errors import InputError, require, tell
from specsim.core.files import Unwritten, write_whole

# Commands of models so small that threads only wait for each other; libraries read the number when they are loaded.
SMALL = {"demo", "train", "soak", "accept", "diff", "certify", "conformance", "sampling-test", "predict"}
_COMPLETION = "_SPECSIM_COMPLETE"
_UNREAD = 141


class _Terminated(KeyboardInterrupt):
    """A SIGTERM, which ends a command in order, as Ctrl-C does."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; its help lists the exit statuses.

    Where nobody reads on (`| head`) it is 141, which a shell reports of a program that SIGPIPE ends. A caller with
    arguments, and torchrun, whose ranks may wait for each other in native code, keep their handling of SIGTERM.
    """
    if arguments is None and "RANK" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process lives
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            status = app(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one, while the interpreter ends
        is_terminated = isinstance(error, _Terminated)
        tell("; ".join(["terminated" if is_terminated else "interrupted", *map(str, error.args)]))
        status = 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)
    except ProcessLost as error:
        tell(error)
        status = PROCESS_LOST
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's own end of a program whose output nobody reads
            _end_unread()
        if not end.code:  # no command ends like that, so it is not done
            _fail("code that this command ran has called exit(); let it return or raise an error")
        raise
    except InputError as error:
        _fail(error)
    except click.UsageError as error:
        _fail(" ".join(error.format_message().split()))
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


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


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


COMMANDS = {
    "Run": (generate, run, serve, train, convert),
    "Check": (diff, certify, sampling_test, soak, conformance, faults, explain, probe, parity, lint_report),
    "Measure": (bench, accept, predict),
    "Simulate": (simulate, plan, sweep, calibrate),
    "Learn": (demo, schema),
}


FUNCTIONS = {command_name(function): function for functions in COMMANDS.values() for function in functions}


@cache
def command(name: str) -> Command:
    """Make a command."""
    return Command(FUNCTIONS[name])


class CommandLine(click.Group):
    """The program, whose help shows its commands by group."""

    def main(self, args: Sequence[str] | None = None) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no more
        """Answer a shell's question, or run a command; returns the exit status, and raises what the command raises."""
        if question := os.environ.get(_COMPLETION):
            return shell_complete(self, {}, "specsim", _COMPLETION, question)
        try:
            with self.make_context("specsim", list(sys.argv[1:] if args is None else args)) as context:
                self.invoke(context)
        except click.exceptions.Exit as end:
            return end.exit_code
        return 0

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands."""
        return list(FUNCTIONS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Command | None:
        """Make a command when it is called."""
        return command(cmd_name) if cmd_name in FUNCTIONS else None

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, text, commands and options."""
        self.format_usage(ctx, formatter)
        write_text(formatter, self.help or "")
        groups = {
            group: [(command_name(function), summary(function), "") for function in functions]
            for group, functions in COMMANDS.items()
        }
        write_rows(formatter, groups, names=17)
        records = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        write_rows(formatter, {"Options": [(*record, "") for record in records if record is not None]})

    def invoke(self, ctx: click.Context) -> None:
        """Run a command, or show the help without one; processes of small models get one thread."""
        if not ctx._protected_args:
            print(ctx.get_help())
            return
        if ctx._protected_args[0] in SMALL:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ.setdefault(name, "1")
        super().invoke(ctx)


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        print("specsim", __version__)
        context.exit()


# Files of a shell below the home folder: the script, and the file that sources it; fish needs none.
_SHELLS = {
    "bash": (".bash_completions/specsim.sh", ".bashrc"),
    "zsh": (".zfunc/specsim.zsh", ".zshrc"),
    "fish": (".config/fish/completions/specsim.fish", ""),
}


def _completion_options() -> list[click.Option]:
    """Make the options that print or install the script of the current shell, by scripts of click."""

    def show(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if not value or context.resilient_parsing:
            return
        shell = Path(os.environ.get("SHELL", "")).name
        require(shell in _SHELLS, "SHELL", shell, "bash, zsh or fish")
        kind = get_completion_class(shell)
        assert kind is not None
        script = kind(context.command, {}, "specsim", _COMPLETION).source()
        print(script if parameter.name == "show_completion" else _install(shell, script))
        context.exit()

    texts = {"install": "Install completion for the current shell.", "show": "Show completion for the current shell."}
    return [
        click.Option(
            [f"--{verb}-completion"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text
        )
        for verb, text in texts.items()
    ]


def _install(shell: str, script: str) -> str:
    """Write the script, and the line that sources it."""
    file, profile = (Path.home() / name if name else None for name in _SHELLS[shell])
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    line = f"source '{file}'"
    if profile is not None:
        text = profile.read_text(encoding="utf-8") if profile.is_file() else ""
        if line not in text:
            profile.write_text(f"{text}\n{line}\n", encoding="utf-8")
    return f"Completion is installed in {file}; start a new shell."


app = CommandLine(
    "specsim",
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
            help="Show the version.",
        ),
        *_completion_options(),
    ],
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Speculative decoding with token trees.

Every command explains itself: specsim COMMAND --help.

Exit status: 0 when done, 1 if a check fails, 2 for bad input, 3 if a process
is lost, 130 after Ctrl-C, 141 after a closed pipe, 143 after SIGTERM.""",
)  # fmt: skip
