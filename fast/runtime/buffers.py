"""Static buffers: tensors at fixed addresses, with guards on both sides that nothing may write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from specsim.core.config import ceil_to
from specsim.core.phases import State

GUARD = 256  # bytes on each side of a buffer
POISON = 0xA5  # content of every byte of a guard

_State = TypeVar("_State", bound=State)


class GuardError(AssertionError):
    """A write next to a static buffer."""

    def __init__(self, side: str, name: str) -> None:
        self.side = side  # before or behind
        self.name = name  # of the buffer
        super().__init__(f"something wrote {side} the static buffer {name}")


class Cut(NamedTuple):
    """One tensor's part of a block: the entries of the first requests."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # entries of this type from the block's first byte


@dataclass(frozen=True, slots=True)
class Block:
    """Static tensors that are adjacent in memory, so that one copy takes all of them."""

    raw: torch.Tensor  # u8, the memory
    tensors: dict[str, torch.Tensor]  # views of it, in their order
    _cuts: dict[tuple[int, int], list[Cut]] = field(default_factory=dict)  # by number of requests and bucket

    def copy(self, size: int, bucket: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy the memory, and return it with each tensor's part of the first `size` of `bucket` requests."""
        cuts = self._cuts.get((size, bucket))
        if cuts is None:
            cuts = self._cuts[size, bucket] = [_cut(each, size, bucket) for each in self.tensors.values()]
        raw = self.raw.clone()
        typed = {dtype: raw.view(dtype) for dtype in {cut.dtype for cut in cuts}}
        return raw, [typed[cut.dtype].as_strided(cut.shape, cut.strides, cut.offset) for cut in cuts]


def _cut(tensor: torch.Tensor, size: int, bucket: int) -> Cut:
    rows = size * (len(tensor) // bucket)
    return Cut(tensor.dtype, (rows, *tensor.shape[1:]), tensor.stride(), int(tensor.storage_offset()))


class Buffers:
    """Static tensors by name, each between two guards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._guards: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # before and behind each tensor

    def like(self, name: str, state: _State) -> _State:
        """Make static tensors with a copy of every tensor of a state."""
        copies = {}
        for each in fields(state):
            value = getattr(state, each.name)
            path = f"{name}.{each.name}"
            if isinstance(value, State):
                copies[each.name] = self.like(path, value)
            elif isinstance(value, torch.Tensor):
                copies[each.name] = self.block({path: value}).tensors[path]
        return replace(state, **copies)

    def block(self, values: Mapping[str, torch.Tensor]) -> Block:
        """Make adjacent static tensors with copies of these."""
        starts = [GUARD]
        for value in values.values():
            starts.append(starts[-1] + ceil_to(value.nbytes + 2 * GUARD, GUARD))
        raw = torch.full((starts[-1] - GUARD,), POISON, dtype=torch.uint8, device=self.device)
        tensors = {}
        for (name, value), (start, following) in zip(values.items(), pairwise(starts), strict=True):
            end = start + value.nbytes
            tensors[name] = raw[start:end].view(value.dtype).view(value.shape).copy_(value)
            self._guards[name] = (raw[start - GUARD : start], raw[end : following - GUARD])
        return Block(raw, tensors)

    def check(self) -> None:
        """Raise GuardError for the first buffer next to which something was written, reading device data."""
        for name, guards in self._guards.items():
            for side, guard in zip(("before", "behind"), guards, strict=True):
                if not bool((guard == POISON).all()):
                    raise GuardError(side, name)


def named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prefix the names of tensors."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
