"""Files that one step of the scheduler enters, in both implementations: `python tests/tools/round_walk.py [-v]`.

With `--command "plan --requests 32"`: files that a command enters, without the imports of modules.

A step of one request with the shipped drafter: what a reader opens to follow a round. The fast implementation runs
without graphs, under Triton's interpreter where there is no GPU; the interpreter's own files and torch do not count.
"""

import argparse
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import torch

from specsim.cli.main import app
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import print_table, stdout_console
from specsim.core.engine_options import EngineOptions
from specsim.models.load import load
from specsim.serving.generation import load_engine, make_requests
from specsim.serving.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 17, 3, 40, 8]
Impl = Literal["reference", "fast"]
NOT_READ = {"fast/runtime/interpreter.py", "fast/runtime/launch.py"}  # they run a kernel, whatever it computes


@dataclass(slots=True)
class StepCalls:
    """Calls of one step, by file of the package."""

    files: Counter[str] = field(default_factory=Counter)  # calls that entered a file
    crossings: Counter[tuple[str, str]] = field(default_factory=Counter)  # calls from one folder into another
    deepest: int = 0  # calls on the stack, from the scheduler's step to a drafter's attention
    _stack: list[str] = field(default_factory=list)
    _importing: int = 0  # modules that are being imported

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call or a return; a profile function."""
        if frame.f_code.co_name == "<module>":
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        if self._importing:
            return
        file = _file(frame.f_code.co_filename, frame.f_code.co_name)
        if file is None:
            return
        if event == "call":
            self.files[file] += 1
            if self._stack and _folder(self._stack[-1]) != _folder(file):
                self.crossings[_folder(self._stack[-1]), _folder(file)] += 1
            self._stack.append(file)
            if file.endswith("/attention.py") and any("/drafters/" in caller for caller in self._stack):
                self.deepest = max(self.deepest, len(self._stack))
        elif event == "return" and self._stack:
            self._stack.pop()


@cache
def _file(filename: str, function: str) -> str | None:
    """Name a file of the package by its path, None for any other; comprehensions and lambdas are part of theirs."""
    path = Path(filename)
    if not path.is_absolute() or not path.resolve().is_relative_to(ROOT) or function.startswith("<"):
        return None
    name = path.resolve().relative_to(ROOT).as_posix()
    return name if name.startswith(("specsim/", "reference/", "fast/")) and name not in NOT_READ else None


def _folder(file: str) -> str:
    parts = file.split("/")
    return parts[1] if parts[0] == "specsim" else parts[0]


def walk(impl: Impl) -> StepCalls:
    """Trace the second round of a request."""
    pair = load()
    device = "cuda" if impl == "fast" and torch.cuda.is_available() else "cpu"
    options = EngineOptions(impl, torch.float32, device, "eager" if impl == "fast" else None)
    scheduler = Scheduler(load_engine(pair, SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4), options))
    for request in make_requests(pair, [PROMPT], SamplingParams(max_new_tokens=32, ignore_eos=True), None, 128):
        scheduler.submit(request)
    calls = StepCalls()
    with torch.inference_mode():
        for _ in range(3):
            scheduler.step()
        sys.setprofile(calls.watch)
        try:
            scheduler.step()
        finally:
            sys.setprofile(None)
    return calls


def walk_command(line: str) -> StepCalls:
    """Trace a command, which prints nothing."""
    calls = StepCalls()
    with redirect_stdout(StringIO()):
        sys.setprofile(calls.watch)
        try:
            app(line.split())
        finally:
            sys.setprofile(None)
    return calls


def main() -> int:
    """Print a row for each implementation, or for a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list the files")
    parser.add_argument("--command", help="options of specsim, in place of a step")
    options = parser.parse_args()
    console = stdout_console()
    rows = []
    for name in [options.command] if options.command else get_args(Impl):
        calls = walk_command(name) if options.command else walk(name)
        rows.append((name, str(len(calls.files)), str(calls.crossings.total()), str(calls.deepest)))
        if options.verbose:
            print_table(console, (name, "calls"), [(file, str(count)) for file, count in sorted(calls.files.items())])
    print_table(console, ("run", "files entered", "calls into other folders", "depth at a drafter's attention"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
