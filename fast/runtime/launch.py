"""Launches of kernels: compiled on a GPU, interpreted without one, and seen by a recorder of graphs."""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import no_type_check

import torch

from specsim.fast.runtime.interpreter import spare_the_interpreter

# Triton decides when it is imported whether its library functions are interpreted. Without a GPU nothing else could run
# them, so those of a Triton that was imported before are made again, in the modules that hold them.
if not torch.cuda.is_available() and os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
    loaded = sys.modules.get("triton.language")
    if loaded and type(loaded.sum).__name__ != "InterpretedFunction":
        for module in (loaded.standard, loaded.random, loaded):
            importlib.reload(module)

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    raise ImportError("specsim.fast needs Triton, which is published for Linux; specsim.reference does not") from error

INTERPRETED: bool = knobs.runtime.interpret
if INTERPRETED:
    spare_the_interpreter()

MOST_ENTRIES = tl.TRITON_MAX_TENSOR_NUMEL

Launch = Callable[[], None]
# Receives launches instead of their being run: a context, like torch's own stack of dispatch modes.
recorder: ContextVar[Callable[[str, Launch], None] | None] = ContextVar("recorder", default=None)


@triton.jit
@no_type_check
def await_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before has ended, where this one was launched so that it may begin sooner.

    It stands before any store and any load of another kernel's result. Every kernel launched with PDL has to wait, or
    its successor's successor could begin too early.
    """
    if PDL:
        gdc_wait()


@triton.jit
@no_type_check
def let_successor_begin(PDL: tl.constexpr):
    """Let the next kernel of the stream begin as soon as every program of this one has come here or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
@no_type_check
def await_input(PDL: tl.constexpr):
    """Do both of the above: the first statement of a small kernel that takes PDL."""
    let_successor_begin(PDL)
    await_predecessor(PDL)


_CASTS_ROUND = tl.constexpr(not INTERPRETED)  # the interpreter truncates bf16


@triton.jit
@no_type_check
def nearest(x, DTYPE: tl.constexpr):
    """Round x, f32, to nearest even."""
    if DTYPE == tl.bfloat16 and not _CASTS_ROUND:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


def dot_type(*dtypes: torch.dtype) -> tl.dtype:
    """Type of a product's factors: theirs; f32 where they differ, and in the interpreter, which multiplies no bf16."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED or len(set(dtypes)) > 1 else types.get(dtypes[0], tl.float32)


# Arguments of a launch that are Triton's own when it compiles; its interpreter lets a kernel have them.
_TAKEN = {"device", "device_type", "grid", "num_ctas", "num_stages", "num_warps", "stream", "warmup"}


class Kernel:
    """A Triton kernel, launched as `kernel[grid](name=argument, ...)`.

    Numbers are not specialised, so that one compilation serves every setting; a value that a kernel should know when it
    is compiled is a constexpr. Triton specialises all that a NamedTuple holds: its numbers are constant in a setting.
    Tensors (`*_ptr`, and NamedTuples of them, `*_ptrs`) are specialised by their alignment. PDL, where a kernel takes
    it, is whether it may begin before its predecessor has ended (programmatic dependent launch): on GPUs that can, from
    Hopper on.

    The compiler fuses no product with a sum, unless a launch says enable_fp_fusion: where lanes exchange what they sum,
    each would leave another product unrounded, and lanes that stand for one number would go on with different ones.
    """

    def __init__(self, function: FunctionType) -> None:
        parameters = inspect.signature(function).parameters
        if taken := sorted(_TAKEN & set(parameters)):
            raise ValueError(
                f"{function.__name__} has a parameter {taken[0]}; a compiled launch takes that name itself"
            )
        plain = [
            name
            for name, parameter in parameters.items()
            if parameter.annotation is inspect.Parameter.empty and not name.endswith(("_ptr", "_ptrs"))
        ]
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._takes_pdl = "PDL" in parameters
        self._compiled = triton.jit(do_not_specialize=plain)(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Give a launch over `grid` programs; an empty grid launches nothing."""

        def launch(*args: object, **kwargs: object) -> None:
            if 0 in grid:
                return
            kwargs = {"enable_fp_fusion": False, **kwargs}
            if self._takes_pdl:
                kwargs |= {"PDL": True, "launch_pdl": True} if can_overlap() else {"PDL": False}
            run = self._compiled[grid]
            record = recorder.get()
            if record is None:
                run(*args, **kwargs)
            else:
                record(self.__name__, lambda: run(*args, **kwargs))

        return launch


@functools.cache
def can_overlap() -> bool:
    """Say whether kernels can be launched before their predecessors have ended."""
    is_nvidia = not INTERPRETED and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability() >= (9, 0)


def stages_within(stages: int, stage_bytes: int, spare: int = 0) -> int:
    """Count the stages of a software pipeline, at most `stages`, that fit into shared memory with `spare` bytes left.

    All but one of them hold a tile at a time. Their number changes no result.
    """
    return stages if INTERPRETED else max(2, min(stages, 1 + (_shared_memory() - spare) // stage_bytes))


@functools.cache
def _shared_memory() -> int:
    """Give the bytes that a program can have on the GPU of this process."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def kernel(function: FunctionType) -> Kernel:
    """Decorate a kernel that the host launches; device functions are decorated with triton.jit itself.

    Both carry typing.no_type_check below that decorator: their bodies are Triton's language, not Python's.
    """
    return Kernel(function)


def ceil_div(count: int, size: int) -> int:
    """Count the blocks of `size` that hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Give the least power of two that is at least `count`; 0 of 0, as in Triton."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def block_of(count: int, on_gpu: int, others: int = 1) -> int:
    """Choose the rows of one program, a power of two.

    on_gpu: the choice on a GPU; under the interpreter, where programs are expensive, it is as many rows as there are
    and a tile may hold. others: the tile's entries in each row.
    """
    most = max(1, MOST_ENTRIES // next_power_of_2(others))
    return min(next_power_of_2(max(count, 1)), most) if INTERPRETED else on_gpu


def require_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that is not contiguous: kernels do not take these tensors' strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; allowed: a contiguous tensor")
