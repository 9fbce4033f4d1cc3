"""What a case is: the arguments of one call, and what has to be found afterwards."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

DEVICE = object()  # an argument that stands for the device that the call is made on


@dataclass(frozen=True, slots=True)
class Law:
    """The law of a result, int32 [rows, width], every row of which is one draw of its own.

    outcomes: by the entries of a row its probability; they sum to one. An outcome that is not among them never happens.
    """

    outcomes: Mapping[tuple[int, ...], float]
    rows: int
    dtype: ClassVar = torch.int32

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.rows, len(next(iter(self.outcomes)))


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: in the contract's order. expected: by the names of results; one that is left out is not compared.

    rows: by name of a result, the rows (of its first dimension) that count, where not all do. tolerance: most that a
    result may differ whose match is `close`. alternatives: other results, of which all may stand in for `expected`.
    """

    arguments: tuple[Any, ...]
    expected: Mapping[str, torch.Tensor | list[torch.Tensor] | Law]
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tolerance: float = 0.0
    alternatives: tuple[Mapping[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One case of an operation; `build` makes its call, with what the reference column says of it.

    may_refuse: an exception is as good as the right result, for input that the contract does not promise. perilous:
    what is in error may hang or end the process, so that it is called in one of its own. adapt: the call as this
    function takes it, where a name stands for several conventions.
    """

    operation: str
    name: str
    build: Callable[[], Call]
    may_refuse: bool = False
    perilous: bool = False
    adapt: Callable[[Callable, Call], Call] | None = None

    @property
    def id(self) -> str:
        """How a report names it."""
        return f"{self.operation}: {self.name}"


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same entries with others between them, so that no two neighbours of a row are neighbours in memory."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def replaced(call: Call, place: int, value: Any) -> Call:
    """The call with another argument at this place."""
    arguments = list(call.arguments)
    arguments[place] = value
    return replace(call, arguments=tuple(arguments))


def integers(rows: Iterable, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of integers, also of none."""
    return torch.tensor(list(rows), dtype=dtype)
