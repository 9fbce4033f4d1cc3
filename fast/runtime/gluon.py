"""Names that kernels in Gluon share."""

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its names in Triton 3.6 and 3.7


@dataclass(frozen=True)
class Constants:
    """Fields of a frozen value, which a kernel reads as constants of its compilation."""

    value: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return gl.constexpr(getattr(self.value, name))
