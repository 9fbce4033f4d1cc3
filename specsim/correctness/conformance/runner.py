"""Runs of cases against a module's functions, in a process that a case may end."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

import torch

from specsim.core.children import ProcessLost
from specsim.core.errors import InputError, require
from specsim.core.user_module import CALL_SECONDS, CallTimeout, load_module, one_line, time_limit, user_code
from specsim.core.workers import Workers
from specsim.correctness.conformance import chains, drafting, greedy, slots, target_only, trees
from specsim.correctness.conformance.checked_call import wrong_result
from specsim.correctness.conformance.comparison import ResultDifference
from specsim.correctness.conformance.contract import BY_NAME, OPERATIONS, Call, KernelCase, Operation
from specsim.correctness.conformance.patterns import NOT_WRITTEN, patterns

CASES: tuple[KernelCase, ...] = tuple(
    case
    for operation in OPERATIONS
    for module in (drafting, trees, greedy, target_only, slots, chains)
    for case in module.CASES
    if case.operation == operation.name
)
ANSWER_SECONDS = 30  # for a process to answer after the limit of a call, with the making of its arguments
Status = Literal["equal", "refused", "different", "raised", "ended"]


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Outcome of one case."""

    operation: str  # name of the operation
    case: str  # name of the case
    status: Status  # refused: an exception where one is allowed; ended: the process hung or died
    detail: str = ""  # difference or message
    excerpt: str = ""  # lines with indices, expected and found values around the first wrong element
    patterns: tuple[str, ...] = ()  # what a wrong result looks like, such as a shifted, transposed or stale one

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


def chosen_cases(operations: Sequence[Operation], name: str | None = None) -> list[KernelCase]:
    """Choose all cases of these operations, or those with this name, OPERATION: NAME or NAME.

    InputError for a name that none has.
    """
    cases = [case for operation in operations for case in CASES if case.operation == operation.name]
    chosen = [case for case in cases if name is None or name in (case.id, case.name)]
    near = get_close_matches(name or "", [case.id for case in cases], cutoff=0.3)
    require(chosen, "case", name, f"one of {len(cases)} cases, such as {' or '.join(near or [cases[0].id])}")
    return chosen


class CaseProcess:
    """A process that runs a module's cases one after the other; after one that ends it, a new process."""

    def __init__(self, module: str, device: str, seconds: float = CALL_SECONDS) -> None:
        """Take the module by name or file, the device of its functions, and the limit of a call."""
        self.seconds = seconds
        self._module, self._device = module, device
        self._workers: Workers | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        if self._workers is not None:
            self._workers.__exit__(ProcessLost, None, None)
        self._workers = None

    def run(self, case: KernelCase) -> CaseOutcome:
        """Run one case; InputError for a module without a function for its operation."""
        if self._workers is None:
            self._workers = Workers(1)
            self._workers.submit(_load, self._module, case.operation, self._device).result()
        chosen = (self._module, case.operation, case.name, self._device, self.seconds)
        try:
            outcome, is_sound = self._workers.submit(_run, *chosen).result(timeout=self.seconds + ANSWER_SECONDS)
        except TimeoutError:  # code that Python cannot interrupt
            outcome, is_sound = CaseOutcome(case.operation, case.name, "ended", _no_result(self.seconds)), False
        except ProcessLost as lost:
            outcome, is_sound = CaseOutcome(case.operation, case.name, "ended", f"its process {lost.ending}"), False
        if not is_sound:
            self.__exit__()
        return outcome


def _no_result(seconds: float) -> str:
    return f"no result within {seconds:g} seconds (--time-limit)"


def loaded_function(module: str, operation: str, device: str) -> Callable[..., Any]:
    """Load a module and its function for an operation; InputError where it has none."""
    function = function_of(load_module(module), BY_NAME[operation], device)
    if function is None:
        raise InputError("module", module, f"a module with a function for {operation}")
    return function


def _load(module: str, operation: str, device: str) -> None:
    """Load a module before the time of its first call is counted."""
    loaded_function(module, operation, device)


def _run(module: str, operation: str, name: str, device: str, seconds: float) -> tuple[CaseOutcome, bool]:
    """Run one case in this process, and tell whether others can follow."""
    case = next(case for case in CASES if (case.operation, case.name) == (operation, name))
    outcome = call(loaded_function(module, operation, device), case, torch.device(device), seconds)
    return outcome, outcome.status in ("equal", "different") or (outcome.status != "ended" and _is_sound(device))


def _is_sound(device: str) -> bool:
    """Whether the device still computes: a GPU keeps an error, such as an illegal access, until its process ends."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except Exception:
        return False


def adapted_call(function: Callable[..., Any], case: KernelCase) -> Call:
    """Make the call of a case in the form that the function takes."""
    with _defaults():
        case_call = case.build()
        return case_call if case.adapt is None else case.adapt(function, case_call)


def call(
    function: Callable[..., Any], case: KernelCase, device: torch.device, seconds: float = CALL_SECONDS
) -> CaseOutcome:
    """Call the function once, in this process, and compare its results."""
    case_call = adapted_call(function, case)
    try:
        with warnings.catch_warnings(action="ignore"), time_limit(seconds):
            wrong = wrong_result(function, BY_NAME[case.operation], case_call, device)
    except KeyboardInterrupt:
        raise
    except CallTimeout:
        return CaseOutcome(case.operation, case.name, "ended", _no_result(seconds))
    except BaseException as error:
        status = "refused" if case.may_refuse and _is_refusal(error) else "raised"
        return CaseOutcome(case.operation, case.name, status, one_line(error))
    if wrong is None:
        return CaseOutcome(case.operation, case.name, "equal")
    looks_like = () if wrong.pair is None else tuple(patterns(wrong.pair, _copied_tensors(wrong, case, case_call)))
    return CaseOutcome(case.operation, case.name, "different", str(wrong), wrong.excerpt, looks_like)


def _copied_tensors(wrong: ResultDifference, case: KernelCase, case_call: Call) -> dict[str, torch.Tensor]:
    """List tensors that a wrong result may be a copy of: arguments of the call, and results of earlier cases."""
    arguments = [named for name, value in case_call.arguments.items() for named in _named_tensors(name, value)]
    copies = {
        NOT_WRITTEN if name == wrong.result else f"equal to the argument {name}": tensor for name, tensor in arguments
    }
    operation_cases = (other for other in CASES if other.operation == case.operation)
    with _defaults():
        for earlier in takewhile(lambda other: other is not case, operation_cases):
            for name, value in earlier.build().expected.items():
                same = (tensor for label, tensor in _named_tensors(name, value) if label == wrong.result)
                copies |= {f"stale: the result of an earlier case, {earlier.name}": tensor for tensor in same}
    return copies


def _named_tensors(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a value with the names that a report has for them."""
    items = [(f"{name}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else [(name, value)]
    return [(label, item) for label, item in items if isinstance(item, torch.Tensor)]


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
