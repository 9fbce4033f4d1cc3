"""Check of every address that a kernel reads or writes against the tensors of its launch.

The kernels run under Triton's interpreter, even with a GPU (there compute-sanitizer does it: make sanitize).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from specsim.core.engine_options import EngineOptions
from specsim.core.pool import OutOfSlots
from specsim.correctness.faults.checks.cells import cell
from specsim.correctness.faults.fault import FaultFinding

FIELD = "out of bounds"


class Guard:
    """Tensors of the current launch, and the first access outside them; such an access is masked out."""

    def __init__(self) -> None:
        self.name = ""
        self.first: FaultFinding | None = None
        self._starts = np.empty(0, np.uint64)
        self._ends = np.zeros(1, np.uint64)  # largest end of the tensors before each place among the starts

    def enter(self, name: str, arguments: Any) -> None:
        """Begin a launch."""
        spans = sorted(_span(tensor) for tensor in _tensors(arguments) if tensor.numel())
        self.name = name
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._ends = np.maximum.accumulate(np.array([0, *(end for _, end in spans)], np.uint64))

    def inside(self, pointers: np.ndarray, mask: np.ndarray, what: str) -> np.ndarray:
        """Remove addresses outside all tensors from the mask, and record the first."""
        inside = mask & (pointers < self._ends[np.searchsorted(self._starts, pointers, side="right")])
        num_wrong = np.count_nonzero(mask) - np.count_nonzero(inside)
        if num_wrong and self.first is None:
            self.first = FaultFinding(FIELD, f"kernel {self.name}", "addresses of its tensors", f"{num_wrong} {what}")
        return inside


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@contextmanager
def guarded() -> Iterator[Guard]:
    """Guard every launch of the interpreter."""
    import specsim.fast.runtime.launch  # noqa: F401 - it makes Triton interpret

    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle  # isort: skip

    guard = Guard()
    own_init = GridExecutor._init_args_hst
    own_load = InterpreterBuilder.create_masked_load
    own_store = InterpreterBuilder.create_masked_store

    def init(executor: Any, arguments: Any, named: Any) -> Any:
        tensors = own_init(executor, arguments, named)
        guard.enter(executor.fn.__name__, tensors)
        return tensors

    def load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        inside = guard.inside(pointers.data, mask.data, "reads")
        return own_load(builder, pointers, TensorHandle(inside, mask.dtype), *rest)

    def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        inside = guard.inside(pointers.data, mask.data, "writes")
        return own_store(builder, pointers, value, TensorHandle(inside, mask.dtype), *rest)

    with (
        patch.object(GridExecutor, "_init_args_hst", init),
        patch.object(InterpreterBuilder, "create_masked_load", load),
        patch.object(InterpreterBuilder, "create_masked_store", store),
    ):
        yield guard


def check(setting: dict[str, Any], _device: str) -> list[FaultFinding]:
    """Serve the requests of a cell to their ends; a table's end is a bound too.

    setting: see checks.cells.
    """
    from specsim.correctness.differential.pairs import make_pair
    from specsim.serving.generation import generate

    case = cell(setting)
    pair = make_pair(case.pair, torch.float32)
    with guarded() as guard:
        try:
            options = EngineOptions("fast", device="cpu", graph=case.graph, bucket=case.bucket)
            generate(pair, case.prompts, case.config, case.sampling, engine=options)
        except (OutOfSlots, IndexError) as error:
            guard.first = guard.first or FaultFinding(FIELD, type(error).__name__, "existing columns", str(error))
    return [guard.first] if guard.first else []
