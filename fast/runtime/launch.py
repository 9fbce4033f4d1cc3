"""Kernel launches: compiled on a GPU, interpreted without one, and visible to a graph recorder."""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any, no_type_check

import torch

from specsim.core.errors import require
from specsim.fast.runtime.interpreter import spare_the_interpreter

# Triton decides at import whether its library functions are interpreted. Without a GPU they must be, so a Triton that
# was imported before is reloaded, module by module.
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
# Receives launches in place of running them; a context variable, like torch's own stack of dispatch modes.
recorder: ContextVar[Callable[[str, Launch], None] | None] = ContextVar("recorder", default=None)


@triton.jit
@no_type_check
def await_predecessor(PDL: tl.constexpr):
    """Wait until the previous kernel has ended, where this one was launched to begin earlier.

    The call precedes every store and every load of another kernel's result. Every kernel launched with PDL has to wait,
    or its successor's successor could begin too early.
    """
    if PDL:
        gdc_wait()


@triton.jit
@no_type_check
def let_successor_begin(PDL: tl.constexpr):
    """Let the next kernel of the stream begin once every program of this one has called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
@no_type_check
def await_input(PDL: tl.constexpr):
    """Do both of the above, as the first statement of a small kernel with PDL."""
    let_successor_begin(PDL)
    await_predecessor(PDL)


_CASTS_ROUND = tl.constexpr(not INTERPRETED)  # the interpreter truncates bf16 and fp8


@triton.jit
@no_type_check
def nearest(x, DTYPE: tl.constexpr):
    """Round x, f32, to the nearest value of DTYPE, ties to even."""
    if DTYPE == tl.bfloat16 and not _CASTS_ROUND:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if DTYPE == tl.float8e4nv and not _CASTS_ROUND:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        small = tl.abs(x) + 16384.0 - 16384.0  # below 2^-6 numbers are multiples of 2^-9
        small = small.to(tl.uint32, bitcast=True) | (bits & 0x80000000)
        rounded = tl.where(tl.abs(x) < 0.015625, small, rounded)
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
@no_type_check
def stored(x, scale, DTYPE: tl.constexpr):
    """Convert x, f32, to the type of a KV pool, where fp8 numbers are divided by their scale."""
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        x = tl.minimum(tl.div_rn(x, scale), 448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return nearest(x, DTYPE)


def dot_type(*dtypes: torch.dtype) -> tl.dtype:
    """Choose the type of a product's factors: their own, or f32 where they differ and in the interpreter.

    The interpreter multiplies no bf16.
    """
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED or len(set(dtypes)) > 1 else types.get(dtypes[0], tl.float32)


GLUON_TRITON = ("3.6", "3.7")  # versions whose names of Gluon this package knows

# Launch arguments that a compiled Triton kernel reserves; the interpreter accepts them as parameters.
_RESERVED = {"device", "device_type", "grid", "num_ctas", "num_stages", "num_warps", "stream", "warmup"}


class Kernel:
    """A Triton kernel, launched as `kernel[grid](name=argument, ...)`.

    Numbers are not specialised, so one compilation serves every setting. A value that a kernel must know at compilation
    is a constexpr. Triton specialises everything in a NamedTuple; its numbers are constant in a setting. Tensors
    (`*_ptr`, and NamedTuples of them, `*_ptrs`) are specialised by alignment. PDL, where a kernel has it, says whether
    it may begin before its predecessor has ended (programmatic dependent launch), on GPUs from Hopper on.

    The compiler fuses no product with a sum, unless a launch sets enable_fp_fusion. Where lanes exchange their sums,
    each lane would leave another product unrounded, and lanes with the same number would continue with different ones.

    jit: compiles it, for Triton or for Gluon.
    """

    def __init__(self, function: FunctionType, jit: Callable[..., Any] = triton.jit) -> None:
        parameters = inspect.signature(function).parameters
        if reserved := sorted(_RESERVED & set(parameters)):
            raise ValueError(
                f"{function.__name__} has a parameter {reserved[0]}; a compiled launch takes that name itself"
            )
        plain = [
            name
            for name, parameter in parameters.items()
            if parameter.annotation is inspect.Parameter.empty and not name.endswith(("_ptr", "_ptrs"))
        ]
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._takes_pdl = "PDL" in parameters
        self._compiled = jit(do_not_specialize=plain)(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Make a launch over `grid` programs, which does nothing for an empty grid."""

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


def can_overlap() -> bool:
    """Check whether kernels can be launched before their predecessors have ended."""
    return (capability() or (0, 0)) >= (9, 0)


def has_warp_roles() -> bool:
    """Check whether kernels in Gluon run here, whose warps have roles: on Hopper GPUs, with a Triton that is known."""
    return (capability() or (0, 0))[0] == 9 and ".".join(triton.__version__.split(".")[:2]) in GLUON_TRITON


def check_kv_dtypes(**dtypes: str) -> None:
    """Raise InputError for KV in fp8 on a GPU whose compute capability has no such numbers."""
    version = capability()
    if version is None or version >= (8, 9):
        return
    for name, dtype in dtypes.items():
        has = f"{version[0]}.{version[1]}"
        allowed = f"model on this GPU: 8-bit numbers need compute capability 8.9 or more, and it has {has}"
        require(dtype == "model", name, dtype, allowed)


@functools.cache
def capability() -> tuple[int, int] | None:
    """Read the compute capability of this process's GPU; None in the interpreter and with GPUs of other makers."""
    return None if INTERPRETED or torch.version.hip is not None else torch.cuda.get_device_capability()


def stages_within(stages: int, stage_bytes: int, spare: int = 0) -> int:
    """Count the pipeline stages, at most `stages`, that fit into shared memory with `spare` bytes left.

    All stages but one hold a tile at a time. Their number changes no result.
    """
    return stages if INTERPRETED else max(2, min(stages, 1 + (_shared_memory() - spare) // stage_bytes))


@functools.cache
def _shared_memory() -> int:
    """Count the bytes of shared memory of one program on this process's GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def kernel(function: FunctionType) -> Kernel:
    """Decorate a kernel that the host launches.

    Device functions are decorated with triton.jit. Both have typing.no_type_check below that decorator, as their bodies
    are in Triton's language, not Python.
    """
    return Kernel(function)


def ceil_div(count: int, size: int) -> int:
    """Divide and round up: the number of blocks of `size` for `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Compute the least power of two that is at least `count`, 0 for 0 as in Triton."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def next_power_of_16(count: int) -> int:
    """Compute the least power of 16 that is at least `count`, so that a kernel is compiled for few sizes."""
    return 16 ** ceil_div((max(count, 1) - 1).bit_length(), 4)


def block_of(count: int, on_gpu: int, others: int = 1) -> int:
    """Choose the number of rows of one program, a power of two.

    on_gpu: the choice on a GPU. Under the interpreter, where programs are expensive, it is all rows, up to the largest
    tile. others: the tile's entries in each row.
    """
    most = max(1, MOST_ENTRIES // next_power_of_2(others))
    return min(next_power_of_2(max(count, 1)), most) if INTERPRETED else on_gpu


def require_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that is not contiguous, as kernels ignore these tensors' strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; allowed: a contiguous tensor")
