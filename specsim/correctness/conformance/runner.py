"""Runs of all cases against a module's functions, in the order of the operations.

python -m specsim.correctness.conformance.runner MODULE OPERATION CASE DEVICE FILE runs one case in its own process.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from types import ModuleType
from typing import Any, Literal

import torch

from specsim.core.children import child_words, describe_end, python_path, run_child, temporary_folder
from specsim.core.errors import InputError, require
from specsim.core.user_module import CALL_SECONDS, load_module, one_line, time_limit, user_code
from specsim.correctness.conformance import chains, drafting, greedy, slots, target_only, trees
from specsim.correctness.conformance.comparison import ResultDifference, difference, guard_all, outline, pieces, tensors
from specsim.correctness.conformance.contract import BY_NAME, DEVICE, OPERATIONS, Call, KernelCase, Operation

SECONDS = 2 * CALL_SECONDS  # limit of a process, its start included
CASES: tuple[KernelCase, ...] = tuple(
    case
    for operation in OPERATIONS
    for module in (drafting, trees, greedy, target_only, slots, chains)
    for case in module.CASES
    if case.operation == operation.name
)
Status = Literal["equal", "refused", "different", "raised", "ended"]


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Outcome of one case."""

    operation: str  # name of the operation
    case: str  # name of the case
    status: Status  # refused: an exception where one is allowed; ended: the process hung or died
    detail: str = ""  # difference or message

    @property
    def passed(self) -> bool:
        """Whether the status is equal or refused."""
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
    with user_code("module", _file(module), f"a module whose attribute {name} can be read"):
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


def run(module: str, case: KernelCase, device: str) -> CaseOutcome:
    """Run one case, in this process or, if it is perilous, in its own."""
    if case.perilous:
        return _run_in_process(module, case, device)
    function = function_of(load_module(module), BY_NAME[case.operation], device)
    if function is None:
        raise InputError("module", module, f"a module with a function for {case.operation}")
    return call(function, case, torch.device(device))


def call(function: Callable[..., Any], case: KernelCase, device: torch.device) -> CaseOutcome:
    """Call the function once, in this process, and compare its results."""
    operation = BY_NAME[case.operation]
    with _defaults():
        case_call = case.build()
        case_call = case_call if case.adapt is None else case.adapt(function, case_call)
    try:
        values = case_call.arguments.values()
        arguments = [device if value is DEVICE else guard_all(value, device) for value in values]
        handed = tensors(arguments)
        before = outline(handed)
        with warnings.catch_warnings(action="ignore"), time_limit():
            returned = function(*handed)
            if device.type == "cuda":
                torch.cuda.synchronize()
        wrong = (
            _miscounted(operation, returned)
            or _first_wrong(operation, _results(operation, arguments, returned), case_call, device)
            or _misused(operation, arguments, before, outline(handed))
        )
        detail = str(wrong) if wrong else ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status = "refused" if case.may_refuse and _is_refusal(error) else "raised"
        return CaseOutcome(case.operation, case.name, status, one_line(error))
    return CaseOutcome(case.operation, case.name, "different" if detail else "equal", detail)


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


def _first_wrong(
    operation: Operation, results: dict[str, Any], case_call: Call, device: torch.device
) -> ResultDifference | None:
    """Find the first difference from the expected results, unless an alternative fits."""
    for name in case_call.expected:
        result = results.get(name)
        if isinstance(result, torch.Tensor) and result.device.type != device.type:
            return ResultDifference(name, None, f"a tensor on {device.type}", f"one on {result.device.type}")
    firsts = []
    for expected in (case_call.expected, *case_call.alternatives):
        fitted = replace(case_call, expected=expected)
        differences = (difference(value, results.get(value.name), fitted) for value in operation.results)
        firsts.append(next((first for first in differences if first is not None), None))
    return None if None in firsts else firsts[0]


def _results(operation: Operation, arguments: list[Any], returned: Any) -> dict[str, Any]:
    """Collect results by name: arguments written in place, and returned values, nested or not."""
    values = zip(operation.arguments, arguments, strict=True)
    written = {value.name: tensors(argument) for value, argument in values if value.role in ("out", "inout")}
    return written | dict(zip(_returned(operation), _flat(returned), strict=False))


def _returned(operation: Operation) -> list[str]:
    return [value.name for value in operation.results if value.role == "returned"]


def _miscounted(operation: Operation, returned: Any) -> ResultDifference | None:
    """Report too many returned values, which callers cannot unpack; missing ones differ when compared."""
    names = _returned(operation)
    count = len(_flat(returned))
    if not 0 < len(names) < count:
        return None
    return ResultDifference("number of returned values", None, f"{len(names)} ({', '.join(names)})", str(count))


def _flat(returned: Any) -> list[Any]:
    if isinstance(returned, (tuple, list)):
        return [leaf for value in returned for leaf in _flat(value)]
    return [returned]


def _misused(
    operation: Operation, arguments: list[Any], before: list[Any], after: list[Any]
) -> ResultDifference | None:
    """Find a write out of bounds, a changed input, or a result in other memory.

    before, after: outlines of the call.
    """
    for value, argument, then, now in zip(operation.arguments, arguments, before, after, strict=True):
        guarded_tensors = pieces(argument)
        if any(guarded.is_overrun for guarded in guarded_tensors):
            return ResultDifference(value.name, None, "no write outside the tensor", "a write out of bounds")
        if value.role == "in" and (now != then or any(guarded.is_changed for guarded in guarded_tensors)):
            return ResultDifference(value.name, None, "an unchanged input", "changed content")
        if value.role in ("out", "inout") and any(guarded.is_moved for guarded in guarded_tensors):
            return ResultDifference(value.name, None, "a tensor in its own memory", "one in other memory")
    return None


def _run_in_process(module: str, case: KernelCase, device: str) -> CaseOutcome:
    """Run the case in its own process, which may hang or die."""
    with temporary_folder() as folder:
        outcome_path = folder / "outcome.json"
        arguments = (module, case.operation, case.name, device, str(outcome_path))
        words = child_words(folder, "specsim.correctness.conformance.runner", *arguments)
        try:
            child = run_child(words, SECONDS, env=os.environ | python_path())
        except TimeoutExpired:
            return CaseOutcome(case.operation, case.name, "ended", f"no result within {SECONDS} seconds")
        if not outcome_path.exists():
            last = child.err.strip().splitlines()[-1:] or ["no message"]
            return CaseOutcome(case.operation, case.name, "ended", f"it {describe_end(child.status)}: {last[0]}")
        return CaseOutcome(**json.loads(outcome_path.read_text()))


def main(module: str, operation: str, name: str, device: str, file: str) -> None:
    """Run one case, and write its outcome for the waiting process."""
    function = function_of(load_module(module), BY_NAME[operation], device)
    if function is None:
        raise LookupError(f"{module} has no function for {operation}")
    case = next(case for case in CASES if (case.operation, case.name) == (operation, name))
    Path(file).write_text(json.dumps(asdict(call(function, case, torch.device(device)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
