"""Captured work: a CUDA graph on a GPU, its emulation without one.

The emulation keeps the rules of a CUDA graph. A replay repeats the captured operations on the captured buffers with
every host value frozen. An operation that reads device data on the host cannot be captured.
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
    """An operation in a capture reads device data on the host, so that no replay could repeat it."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None: ...


def capture(work: Launch, device: torch.device) -> Graph:
    """Capture `work`, which runs once or twice meanwhile, so its buffers should have padded rows only."""
    return _capture_cuda(work) if device.type == "cuda" else Tape.of(work)


def _capture_cuda(work: Launch) -> Graph:
    """Capture a CUDA graph, after a run that compiles kernels and allocates library workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Libraries' own threads may ask about events meanwhile, as NCCL's watchdog does; only this thread is captured.
    with _without_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection, as Python could free an older graph and so invalidate a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class TapeStep:
    """One captured operation."""

    name: str
    is_kernel: bool  # one of this package
    run: Launch  # repeats it


class Tape:
    """The emulated graph: operations in the order of their capture."""

    def __init__(self) -> None:
        self.steps: list[TapeStep] = []

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
        self.steps.append(TapeStep(name, True, launch_unseen))

    def replay(self) -> None:
        for step in self.steps:
            step.run()

    @property
    def framework_operations(self) -> list[str]:
        """Names of torch's computations in this graph, without this package's kernels, views and allocations."""
        return [step.name for step in self.steps if not step.is_kernel and step.name not in _ALLOCATIONS]


def _unseen(launch: Launch) -> Launch:
    """Wrap a launch so that the interpreter's own torch operations are not captured."""

    def run() -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            launch()

    return run


_ALLOCATIONS = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
# The result or the size of these operations needs device data on the host.
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Recording(TorchDispatchMode):
    """A mode that runs and captures every torch operation."""

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
        if func.is_view:  # in inference mode also `to` and `reshape`, which may copy: their parts say which
            with self:
                parts_out = func.decompose(*args, **kwargs)
            if parts_out is not NotImplemented:
                return parts_out
        out = func(*args, **kwargs)
        if name in _ALLOCATIONS:
            self._tape.steps.append(TapeStep(name, False, lambda: _poison(out)))
        elif func._schema.is_mutable:
            self._tape.steps.append(TapeStep(name, False, lambda: func(*args, **kwargs)))
        elif not func.is_view:
            self._tape.steps.append(TapeStep(name, False, lambda: _overwrite(out, func(*args, **kwargs))))
        return out


def _has_mask(args: tuple) -> bool:
    """Check whether an indexing operation has a boolean mask, as the host would then read its result's size."""
    masks = (torch.bool, torch.uint8)
    return any(
        isinstance(arg, (list, tuple)) and any(index is not None and index.dtype in masks for index in arg)
        for arg in args
    )


def _poison(allocated: torch.Tensor) -> None:
    """Fill memory that a graph allocates, as nothing may use the content of an earlier replay."""
    dtype = allocated.dtype
    filler = True if dtype == torch.bool else float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    allocated.fill_(filler)


def _overwrite(recorded: Any, computed: Any) -> None:
    for old, new in zip(tree_leaves(recorded), tree_leaves(computed), strict=True):
        old.copy_(new)


class _NoHostReads(TorchFunctionMode):
    """A mode that refuses host reads of a tensor that no dispatch mode sees."""

    _NAMES = frozenset("item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__ nonzero".split())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in self._NAMES or (name == "to" and "cpu" in map(str, args[1:]))
        if reads and args and isinstance(args[0], torch.Tensor):
            raise HostRead(f"Tensor.{name} reads device data on the host; a graph cannot repeat it")
        return func(*args, **(kwargs or {}))
