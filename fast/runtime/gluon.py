"""Names that kernels in Gluon share."""

from typing import Any, Self, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
