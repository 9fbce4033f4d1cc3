"""Runs of cases against a module's functions."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from specsim.core.errors import InputError, require, text_of
from specsim.core.user_module import load_module, user_code
from specsim.core.workers import python_path
from specsim.correctness.conformance.case import DEVICE, Call, Case
from specsim.correctness.conformance.comparison import Difference, difference
from specsim.correctness.conformance.contract import BY_NAME, OPERATIONS, Operation
from specsim.correctness.conformance.memory import outline, pieces, place_all, tensors

SECONDS = 120  # limit of a process
Status = Literal["equal", "refused", "different", "raised", "ended"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one case."""

    operation: str
    case: str
    status: Status  # refused: an exception where one is allowed; ended: the process hung or died
    detail: str = ""  # difference or message

    @property
    def passed(self) -> bool:
        return self.status in ("equal", "refused")


def name_of(module: ModuleType, operation: Operation, device: str = "cpu") -> str | None:
    """Find the name of the operation's function in the module, None where it has none.

    Names in _cpu are for the CPU only. InputError for a module that raises when its attribute is read.
    """
    names = sorted(operation.functions, key=lambda name: name.endswith("_cpu") != (device == "cpu"))
    with user_code("module", _file(module), f"a module whose attribute {' or '.join(names)} can be read"):
        return next((name for name in names if callable(getattr(module, name, None))), None)


def _file(module: ModuleType) -> str:
    names = (vars(module).get(name) for name in ("__file__", "__name__"))
    return Path(next(filter(None, names), "module")).name


def function_of(module: ModuleType, operation: Operation, device: str = "cpu") -> Callable[..., Any] | None:
    """Find the operation's function in the module, None where it has none."""
    name = name_of(module, operation, device)
    return None if name is None else getattr(module, name)


def chosen_operations(module: ModuleType, names: Sequence[str] | None) -> list[Operation]:
    """Choose the operations to run: the named ones, or all that the module has.

    InputError for a named operation that the module lacks.
    """
    for name in names or ():
        require(name in BY_NAME, "ops", name, ", ".join(BY_NAME))
        if name_of(module, BY_NAME[name]) is None:
            functions = " or ".join(BY_NAME[name].functions)
            allowed = f"an operation that {_file(module)} implements; for this one it needs {functions}"
            raise InputError("ops", name, allowed)
    chosen = [BY_NAME[name] for name in dict.fromkeys(names)] if names else list(OPERATIONS)
    chosen = [operation for operation in chosen if name_of(module, operation) is not None]
    if not chosen:
        functions = ", ".join(operation.functions[0] for operation in OPERATIONS)
        raise InputError("module", _file(module), f"a module with at least one of the functions {functions}")
    return chosen


def run(module: str, case: Case, device: str) -> Outcome:
    """Run one case, in this process or, if it is perilous, in its own."""
    if case.perilous:
        return _run_in_process(module, case, device)
    function = function_of(load_module(module), BY_NAME[case.operation], device)
    if function is None:
        raise InputError("module", module, f"a module with a function for {case.operation}")
    return call(function, case, torch.device(device))


def call(function: Callable[..., Any], case: Case, device: torch.device) -> Outcome:
    """Call the function once, in this process, and compare its results."""
    operation = BY_NAME[case.operation]
    with _defaults():
        made = case.build()
        made = made if case.adapt is None else case.adapt(function, made)
    try:
        arguments = [device if each is DEVICE else place_all(each, device) for each in made.arguments.values()]
        handed = tensors(arguments)
        before = outline(handed)
        with warnings.catch_warnings(action="ignore"):
            returned = function(*handed)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status = "refused" if case.may_refuse and _is_refusal(error) else "raised"
        return Outcome(case.operation, case.name, status, f"{type(error).__name__}: {text_of(str, error)}")
    wrong = (
        _miscounted(operation, returned)
        or _first_wrong(operation, _results(operation, arguments, returned), made, device)
        or _misused(operation, arguments, before, outline(handed))
    )
    return Outcome(case.operation, case.name, "different" if wrong else "equal", str(wrong) if wrong else "")


@contextmanager
def _defaults() -> Iterator[None]:
    """Restore torch's own defaults, whatever a module has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _is_refusal(error: BaseException) -> bool:
    """Whether a caller can continue, which it cannot after an exit or an error that the GPU keeps."""
    return isinstance(error, Exception) and not isinstance(error, torch.AcceleratorError)


def _first_wrong(operation: Operation, found: dict[str, Any], made: Call, device: torch.device) -> Difference | None:
    """Find the first difference from the expected results, unless an alternative fits."""
    for name in made.expected:
        result = found.get(name)
        if isinstance(result, torch.Tensor) and result.device.type != device.type:
            return Difference(name, None, f"a tensor on {device.type}", f"one on {result.device.type}")
    firsts = []
    for expected in (made.expected, *made.alternatives):
        fitted = replace(made, expected=expected)
        differences = (difference(value, found.get(value.name), fitted) for value in operation.results)
        firsts.append(next((each for each in differences if each is not None), None))
    return None if None in firsts else firsts[0]


def _results(operation: Operation, arguments: list[Any], returned: Any) -> dict[str, Any]:
    """Collect results by name: arguments written in place, and returned values, nested or not."""
    values = zip(operation.arguments, arguments, strict=True)
    found = {value.name: tensors(argument) for value, argument in values if value.role in ("out", "inout")}
    return found | dict(zip(_returned(operation), _flat(returned), strict=False))


def _returned(operation: Operation) -> list[str]:
    return [value.name for value in operation.results if value.role == "returned"]


def _miscounted(operation: Operation, returned: Any) -> Difference | None:
    """Report too many returned values, which callers cannot unpack; missing ones differ when compared."""
    names = _returned(operation)
    count = len(_flat(returned))
    if not 0 < len(names) < count:
        return None
    return Difference("number of returned values", None, f"{len(names)} ({', '.join(names)})", str(count))


def _flat(returned: Any) -> list[Any]:
    if isinstance(returned, (tuple, list)):
        return [leaf for each in returned for leaf in _flat(each)]
    return [returned]


def _misused(operation: Operation, arguments: list[Any], before: list[Any], after: list[Any]) -> Difference | None:
    """Find a write out of bounds, a changed input, or a result in other memory.

    before, after: outlines of the call.
    """
    for value, argument, then, now in zip(operation.arguments, arguments, before, after, strict=True):
        placed = pieces(argument)
        if any(each.is_overrun for each in placed):
            return Difference(value.name, None, "no write outside the tensor", "a write out of bounds")
        if value.role == "in" and (now != then or any(each.is_changed for each in placed)):
            return Difference(value.name, None, "an unchanged input", "changed content")
        if value.role in ("out", "inout") and any(each.is_moved for each in placed):
            return Difference(value.name, None, "a tensor in its own memory", "one in other memory")
    return None


def _run_in_process(module: str, case: Case, device: str) -> Outcome:
    """Run the case in its own process, which may hang or die."""
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "outcome.json"
        program = [sys.executable, "-m", "specsim.correctness.conformance.one_case"]
        command = [*program, module, case.operation, case.name, device, str(left)]
        try:
            done = subprocess.run(
                command, env=os.environ | python_path(), capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(case.operation, case.name, "ended", f"no result within {SECONDS} seconds")
        if not left.exists():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            return Outcome(case.operation, case.name, "ended", f"exit status {done.returncode}: {last[0]}")
        return Outcome(**json.loads(left.read_text()))


def write(outcome: Outcome, path: Path) -> None:
    """Write an outcome for the waiting process."""
    path.write_text(json.dumps(asdict(outcome)))
