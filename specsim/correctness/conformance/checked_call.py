"""A call of a function with guarded arguments, and the check of all that it may do wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specsim.correctness.conformance.comparison import ResultDifference, difference, guard_all, outline, pieces, tensors
from specsim.correctness.conformance.contract import DEVICE, Call, Operation


def wrong_result(
    function: Callable[..., Any], operation: Operation, case_call: Call, device: torch.device
) -> ResultDifference | None:
    """Call the function once, with guarded copies of the arguments; its first wrong result, None without any."""
    values = case_call.arguments.values()
    arguments = [device if value is DEVICE else guard_all(value, device) for value in values]
    handed = tensors(arguments)
    before = outline(handed)
    returned = function(*handed)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (
        _miscounted(operation, returned)
        or _first_wrong(operation, _results(operation, arguments, returned), case_call, device)
        or _misused(operation, arguments, before, outline(handed))
    )


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
