"""Static buffers, and work recorded once and replayed: a CUDA graph on a GPU, its emulation without one.

The emulation keeps the rules of a CUDA graph: a replay repeats the recorded operations on the recorded buffers with
every number of the host frozen, and what reads device data on the host cannot be recorded.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specsim.core.config import ceil_to
from specsim.core.phases import State
from specsim.fast.runtime.launch import Launch, recorder

GUARD, POISON = 256, 0xA5  # bytes on each side of a buffer, and what they hold
_Value = TypeVar("_Value", bound=State | torch.Tensor | None)


class GuardError(AssertionError):
    """Something wrote beside a static buffer."""


class HostRead(RuntimeError):
    """A capture met an operation that reads device data on the host: a replay could not repeat it."""


class Buffers:
    """Static tensors, each between two guards that nobody may write."""

    def __init__(self, device: torch.device):
        self.device = device
        self._guards: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def like(self, name: str, value: _Value) -> _Value:
        """Static tensors that hold a copy of a tensor, or of every tensor of a state."""
        if isinstance(value, State):
            parts = {each.name: getattr(value, each.name) for each in fields(value)}
            return replace(value, **{part: self.like(f"{name}.{part}", parts[part]) for part in parts})
        return self.block({name: value}).tensors[name] if isinstance(value, torch.Tensor) else value

    def block(self, values: Mapping[str, torch.Tensor]) -> "Block":
        """Static tensors that hold copies of these, one behind the other in memory."""
        places, start = {}, GUARD
        for name, value in values.items():
            places[name] = start
            start += ceil_to(value.numel() * value.itemsize + 2 * GUARD, GUARD)
        raw = torch.full((start - GUARD,), POISON, dtype=torch.uint8, device=self.device)
        tensors = {}
        for (name, first), behind in zip(places.items(), [*places.values(), start][1:], strict=True):
            value = values[name]
            end = first + value.numel() * value.itemsize
            tensors[name] = raw[first:end].view(value.dtype).view(value.shape).copy_(value)
            self._guards[name] = raw[first - GUARD : first], raw[end : behind - GUARD]
        return Block(raw, tensors)

    def check(self) -> None:
        """Raises GuardError naming the first buffer beside which something was written; reads device data."""
        for name, guards in self._guards.items():
            for side, guard in zip(("before", "behind"), guards, strict=True):
                if not bool((guard == POISON).all()):
                    raise GuardError(f"something wrote {side} the static buffer {name}")


@dataclass(frozen=True, slots=True)
class Block:
    """Static tensors and the memory, bytes, in which they lie one behind the other: one copy takes all of them."""

    raw: torch.Tensor
    tensors: dict[str, torch.Tensor]
    _cuts: dict[tuple[int, int], list[tuple]] = field(default_factory=dict)

    def copy(self, size: int, bucket: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A copy of the memory, and in it of every tensor what belongs to the first `size` of `bucket` requests."""
        cuts = self._cuts.get((size, bucket)) or self._cut(size, bucket)
        raw = self.raw.clone()
        typed = {dtype: raw.view(dtype) for dtype in {tensor.dtype for tensor in self.tensors.values()}}
        return raw, [typed[dtype].as_strided(*place) for dtype, *place in cuts]

    def _cut(self, size: int, bucket: int) -> list[tuple]:
        """Data type, shape, strides and offset of every tensor's part."""
        cuts = self._cuts[size, bucket] = [
            (
                each.dtype,
                (size * (len(each) // bucket), *each.shape[1:]),
                each.stride(),
                each.storage_offset(),
            )
            for each in self.tensors.values()
        ]
        return cuts


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
    """One recorded operation: its name, whether it was a kernel of ours, and how it is repeated."""

    name: str
    is_kernel: bool
    run: Launch


class Tape:
    """The emulated graph: operations in the order in which they were recorded."""

    def __init__(self):
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
        """Names of what torch computes in this graph: all that is no kernel of ours, no view and no allocation."""
        return [step.name for step in self.steps if not step.is_kernel and step.name not in _ALLOCATIONS]


def _unseen(launch: Launch) -> Launch:
    """A launch during which the interpreter's own torch operations are not recorded."""

    def run() -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            launch()

    return run


_ALLOCATIONS = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
# What an operation's result or size depends on has to be read on the host.
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Recording(TorchDispatchMode):
    """Runs and records every torch operation."""

    def __init__(self, tape: Tape):
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, str(func)
        is_indexing = name.startswith(("aten.index.", "aten.index_put"))  # which is told by its arguments
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
    """Whether an indexing operation is given a boolean mask, whose result's size has to be read on the host."""
    masks = (torch.bool, torch.uint8)
    return any(
        isinstance(arg, (list, tuple)) and any(each is not None and each.dtype in masks for each in arg) for arg in args
    )


def _poison(allocated: torch.Tensor) -> None:
    """Memory that a graph takes anew holds what an earlier replay left there; nothing may count on it."""
    is_float, dtype = allocated.is_floating_point(), allocated.dtype
    allocated.fill_(float("nan") if is_float else True if dtype == torch.bool else torch.iinfo(dtype).max)


def _overwrite(recorded: Any, computed: Any) -> None:
    for old, new in zip(tree_leaves(recorded), tree_leaves(computed), strict=True):
        old.copy_(new)


class _NoHostReads(TorchFunctionMode):
    """Refuses what reads a tensor on the host without an operation that a dispatch mode could see."""

    _NAMES = frozenset("item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__ nonzero".split())

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        reads = name in self._NAMES or (name == "to" and "cpu" in map(str, args[1:]))
        if reads and args and isinstance(args[0], torch.Tensor):
            raise HostRead(f"Tensor.{name} reads device data on the host; a graph cannot repeat it")
        return func(*args, **(kwargs or {}))
