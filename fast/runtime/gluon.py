"""Names that kernels in Gluon share."""

from typing import Any, Self, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PATIENCE = gl.constexpr(1 << 22)  # polls of a counter, each of about half a microsecond
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7


class Constants(str):
    """Fields of a frozen value, which a kernel reads as constants of its compilation.

    As a string it is what the value prints as, since Triton's hooks write the constants of a compilation as JSON.
    """

    __slots__ = ("value",)

    def __new__(cls, value: Any) -> Self:
        constants = super().__new__(cls, repr(value))
        constants.value = value
        return constants

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return gl.constexpr(getattr(self.value, name))


@gluon.jit
@no_type_check
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Compute the next slot of a ring, and the phase of its barriers."""
    is_last = slot == SLOTS - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
@no_type_check
def _read(p, PAUSE: gl.constexpr):
    wait: gl.constexpr = "nanosleep.u32 20; " if PAUSE else ""
    return gl.inline_asm_elementwise(
        wait + "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [p.to(gl.int64)], gl.int64, False, 1
    )


@gluon.jit
@no_type_check
def await_count(count_ptr, expected):
    """Wait until a counter has reached a number. A wait in vain ends the kernel with an error."""
    left = PATIENCE + 0
    count = _read(count_ptr, False)
    while count < expected:
        count = _read(count_ptr, True)
        left -= 1
        if left == 0:
            gl.inline_asm_elementwise("trap; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)
