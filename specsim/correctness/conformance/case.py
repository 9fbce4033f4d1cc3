"""Cases: the arguments of one call, and its expected results."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from specsim.correctness.conformance.contract import BY_NAME

DEVICE = object()  # stands for the device of the call, as an argument


@dataclass(frozen=True, slots=True)
class SampleDistribution:
    """Distribution of a result, int32 [rows, width], whose rows are independent draws."""

    outcomes: Mapping[tuple[int, ...], float]  # probability of each row; they sum to one, all others are impossible
    rows: int
    dtype: ClassVar[torch.dtype] = torch.int32

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the result."""
        return self.rows, len(next(iter(self.outcomes)))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation."""

    arguments: Mapping[str, Any]  # by name, in the contract's order
    expected: Mapping[str, torch.Tensor | list[torch.Tensor] | SampleDistribution]  # compared results, by name
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)  # compared rows of a result, bool; default all
    tolerance: float = 0.0  # greatest difference of a result whose match is `close`
    alternatives: tuple[Mapping[str, torch.Tensor], ...] = ()  # other accepted results, each as a whole


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One case of an operation."""

    operation: str
    name: str
    build: Callable[[], Call]  # makes the call, with the results of the reference implementation
    may_refuse: bool = False  # whether an exception passes too, for input that the contract excludes
    perilous: bool = False  # whether an error may hang or end the process, so the call runs in its own
    # Adapts the call to the function, where a name stands for several conventions.
    adapt: Callable[[Callable[..., Any], Call], Call] | None = None

    @property
    def id(self) -> str:
        """The name printed in a report."""
        return f"{self.operation}: {self.name}"


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor so that neighbours in a row are not neighbours in memory."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def arguments(operation: str, *values: Any) -> dict[str, Any]:
    """Name an operation's arguments, given in the contract's order."""
    return dict(zip((value.name for value in BY_NAME[operation].arguments), values, strict=True))


def replaced(call: Call, **changes: Any) -> Call:
    """Replace arguments of a call."""
    return replace(call, arguments={**call.arguments, **changes})


def integers(rows: Iterable[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Make a tensor of integers, possibly empty."""
    return torch.tensor(list(rows), dtype=dtype)
