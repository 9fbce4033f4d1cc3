"""Recorded work: a CUDA graph on a GPU, its emulation without one.

The emulation keeps the rules of a CUDA graph: a replay repeats the recorded operations on the recorded buffers with
every number of the host frozen, and an operation that reads device data on the host cannot be recorded.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specsim.fast.runtime.launch import Launch, recorder


class HostRead(RuntimeError):
    """A capture met an operation that reads device data on the host: a replay could not repeat it."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


def capture(work: Launch, device: torch.device) -> Graph:
    """Record `work`, which runs once or twice on the way: its buffers should hold padded rows only."""
    return _capture_cuda(work) if device.type == "cuda" else Tape.of(work)


def _capture_cuda(work: Launch) -> Graph:
    """The first run, outside the capture, compiles kernels and lets libraries make their workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _without_collection(), torch.cuda.graph(graph):
        work()
    return graph


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python may free an older graph at any time, and that would invalidate a capture under way."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded operation."""

    name: str
    is_kernel: bool  # one of this package
    run: Launch  # repeats it


class Tape:
    """The emulated graph: operations in the order in which they were recorded."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @classmethod
    def of(cls, work: Launch) -> "Tape":
        tape = cls()
        with ExitStack() as stack:
            token = recorder.set(tape._record_launch)
            stack.callback(recorder.reset, token)
            stack.enter_context(_NoHostReads())
            stack.enter_context(_Recording(tape))
            work()
        return tape

    def _record_launch(self, name: str, launch: Launch) -> None:
        launch_unseen = _unseen(launch)
        launch_unseen()
        self.steps.append(Step(name, True, launch_unseen))

    def replay(self) -> None:
        for step in self.steps:
            step.run()

    @property
    def framework_operations(self) -> list[str]:
        """Names of torch's computations in this graph: all but kernels of this package, views and allocations."""
        return [step.name for step in self.steps if not step.is_kernel and step.name not in _ALLOCATIONS]


def _unseen(launch: Launch) -> Launch:
    """Wrap a launch so that the interpreter's own torch operations are not recorded."""

    def run() -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            launch()

    return run


_ALLOCATIONS = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
# The host has to read device data for the result or the size of these operations.
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Recording(TorchDispatchMode):
    """Run and record every torch operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        is_indexing = name.startswith(("aten.index.", "aten.index_put"))  # its arguments say whether the host reads
        if _has_mask(args) if is_indexing else _HOST_READS & set(func.tags):
            raise HostRead(f"{name} reads device data on the host; a graph cannot repeat it")
        out = func(*args, **kwargs)
        if name in _ALLOCATIONS:
            self._tape.steps.append(Step(name, False, lambda: _poison(out)))
        elif func._schema.is_mutable:
            self._tape.steps.append(Step(name, False, lambda: func(*args, **kwargs)))
        elif not func.is_view:
            self._tape.steps.append(Step(name, False, lambda: _overwrite(out, func(*args, **kwargs))))
        return out


def _has_mask(args: tuple) -> bool:
    """Say whether an indexing operation has a boolean mask: the host would have to read its result's size."""
    masks = (torch.bool, torch.uint8)
    return any(
        isinstance(arg, (list, tuple)) and any(each is not None and each.dtype in masks for each in arg) for arg in args
    )


def _poison(allocated: torch.Tensor) -> None:
    """Fill memory that a graph allocates: an earlier replay's content is there, which nothing may use."""
    dtype = allocated.dtype
    filler = True if dtype == torch.bool else float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    allocated.fill_(filler)


def _overwrite(recorded: Any, computed: Any) -> None:
    for old, new in zip(tree_leaves(recorded), tree_leaves(computed), strict=True):
        old.copy_(new)


class _NoHostReads(TorchFunctionMode):
    """Refuse reads of a tensor on the host that no dispatch mode could see."""

    _NAMES = frozenset("item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__ nonzero".split())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in self._NAMES or (name == "to" and "cpu" in map(str, args[1:]))
        if reads and args and isinstance(args[0], torch.Tensor):
            raise HostRead(f"Tensor.{name} reads device data on the host; a graph cannot repeat it")
        return func(*args, **(kwargs or {}))
