"""Every address that a kernel reads or writes, held against the tensors that it was given.

The kernels run under Triton's interpreter, also where there is a GPU (there compute-sanitizer does it: make sanitize).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specsim.core.engine_options import EngineOptions
from specsim.core.pool import OutOfSlots
from specsim.correctness.faults.checks.cells import cell
from specsim.correctness.faults.fault import Finding

FIELD = "out of bounds"


class Guard:
    """The tensors of the launch that is under way, and the first access beside them; such an access is left out."""

    def __init__(self):
        self.name, self.first = "", None
        self._starts, self._ends = np.empty(0, np.uint64), np.empty(0, np.uint64)

    def enter(self, name: str, arguments: Any) -> None:
        """A launch begins."""
        spans = sorted(_span(tensor) for tensor in _tensors(arguments) if tensor.numel())
        self.name = name
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._ends = np.maximum.accumulate(np.array([end for _, end in spans], np.uint64)) if spans else self._starts

    def inside(self, pointers: np.ndarray, mask: np.ndarray, what: str) -> np.ndarray:
        """The mask without what lies beside every tensor."""
        place = np.searchsorted(self._starts, pointers, side="right").astype(np.int64) - 1
        is_inside = (place >= 0) & (pointers < self._ends[np.maximum(place, 0)]) if len(self._starts) else mask & False
        wrong = mask.astype(bool) & ~is_inside
        if wrong.any() and self.first is None:
            self.first = Finding(FIELD, f"kernel {self.name}", "addresses of its tensors", f"{int(wrong.sum())} {what}")
        return mask & is_inside


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@contextmanager
def guarded() -> Iterator[Guard]:
    """Watch every launch of the interpreter."""
    import specsim.fast.runtime.launch  # noqa: F401 - which sees to it that Triton interprets

    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle  # isort: skip

    guard = Guard()
    kept = GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def init(executor, arguments, named):
        found = kept[0](executor, arguments, named)
        guard.enter(executor.fn.__name__, found)
        return found

    def load(builder, pointers, mask, *rest):
        inside = guard.inside(pointers.data, mask.data, "reads")
        return kept[1](builder, pointers, TensorHandle(inside, mask.dtype), *rest)

    def store(builder, pointers, value, mask, *rest):
        inside = guard.inside(pointers.data, mask.data, "writes")
        return kept[2](builder, pointers, value, TensorHandle(inside, mask.dtype), *rest)

    GridExecutor._init_args_hst = init
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
    try:
        yield guard
    finally:
        GridExecutor._init_args_hst = kept[0]
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = kept[1:]


def judge(setting: dict[str, Any], device: str) -> list[Finding]:
    """The requests of a cell to their ends; setting: see checks.cells. A table's end is a bound too."""
    from specsim.correctness.differential.pairs import make_pair
    from specsim.serving.generation import generate

    case = cell(setting)
    pair = make_pair(case.pair, torch.float32)
    with guarded() as guard:
        try:
            options = EngineOptions("fast", device="cpu", graph=case.graph, bucket=case.bucket)
            generate(pair, case.prompts, case.config, case.sampling, engine=options)
        except (OutOfSlots, IndexError) as error:
            guard.first = guard.first or Finding(FIELD, type(error).__name__, "columns that there are", str(error))
    return [guard.first] if guard.first else []
