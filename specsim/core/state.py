"""Values of named tensors, the base of the states that the phases of a round exchange."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from specsim.core.printed import parts_html, parts_text
from specsim.core.upload import upload


@dataclass(frozen=True, slots=True, repr=False)
class State:
    """A value of named tensors, the output of one phase and the input of another."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The state's own tensors by name, without those that are None."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if isinstance(value, torch.Tensor)}

    def __repr__(self) -> str:
        return parts_text(type(self).__name__, self._parts)

    def _repr_html_(self) -> str:
        return parts_html(type(self).__name__, self._parts)

    @property
    def _parts(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move the state to a device and its hidden states, the only tensors in the model's dtype, to a dtype."""
        return _moved(self, device, dtype)


@dataclass(frozen=True, slots=True, repr=False)
class PerRequest(State):
    """A state whose tensors all have one entry for each request along the first dimension."""

    def filter(self, requests: torch.Tensor) -> Self:
        """Select requests by index (i64), in that order.

        A slice would not do (sglang#9252).
        """
        return replace(self, **{f.name: _selected(getattr(self, f.name), requests) for f in fields(self)})

    @property
    def is_idle(self) -> bool:
        """Check whether the state has no requests."""
        return self._num_requests == 0

    @property
    def _num_requests(self) -> int:
        return len(next(iter(self.tensors.values())))

    def merge(self, other: Self) -> Self:
        """Append the requests of other to those of self.

        An idle state adds nothing. A tensor that one side lacks is 0 there.
        """
        if self.is_idle or other.is_idle:
            return other if self.is_idle else self
        sizes = (self._num_requests, other._num_requests)
        values = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return replace(self, **{name: _joined(*both, sizes) for name, both in values.items()})


def _selected(value: Any, requests: torch.Tensor) -> Any:
    return value if value is None else value.filter(requests) if isinstance(value, PerRequest) else value[requests]


def _joined(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    if isinstance(first, PerRequest):
        return first.merge(second)
    if first is None and second is None:
        return None
    first = second.new_zeros(sizes[0], *second.shape[1:]) if first is None else first
    second = first.new_zeros(sizes[1], *first.shape[1:]) if second is None else second
    return torch.cat([first, second])


def _moved(value: Any, device: torch.device | str | None, dtype: torch.dtype | None, name: str = "") -> Any:
    if isinstance(value, State):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device, dtype, f.name) for f in fields(value)})
    if isinstance(value, torch.Tensor):
        return upload(value if dtype is None or name != "hidden" else value.to(dtype), device)
    return value
