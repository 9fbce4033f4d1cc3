"""Static buffers: tensors at fixed addresses between guards that nothing may write, and copies of states to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from specsim.core.config import ceil_to
from specsim.core.phases import DraftExtendInput, State
from specsim.core.state import ALL_STEPS

GUARD = 256  # bytes on each side of a buffer
POISON = 0xA5  # content of every byte of a guard
# Content of a padded request's rows by field, where it is not zero.
PADDING = {
    "req_pool_indices": -1,
    "cache_locations": -1,
    "draft_steps": ALL_STEPS,
    "parents": -1,
    "retrieve_next_token": -1,
    "retrieve_next_sibling": -1,
    "predict": -1,
    "accept_index": -1,
    "num_accepted_tokens": 1,
}
# Fields of DraftExtendInput with an entry for each row rather than each request.
_ROW_FIELDS = ("hidden", "input_ids", "positions", "cache_locations")


_State = TypeVar("_State", bound=State)


class GuardError(AssertionError):
    """A write next to a static buffer."""

    def __init__(self, side: str, name: str) -> None:
        self.side = side  # before or behind
        self.name = name  # of the buffer
        super().__init__(f"something wrote {side} the static buffer {name}")


class BlockPart(NamedTuple):
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
    _parts: dict[tuple[int, int], list[BlockPart]] = field(default_factory=dict)  # by number of requests and bucket

    def copy(self, size: int, bucket: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy the memory, and return it with each tensor's part of the first `size` of `bucket` requests."""
        parts = self._parts.get((size, bucket))
        if parts is None:
            parts = self._parts[size, bucket] = [_part(tensor, size, bucket) for tensor in self.tensors.values()]
        raw = self.raw.clone()
        typed = {dtype: raw.view(dtype) for dtype in {part.dtype for part in parts}}
        return raw, [typed[part.dtype].as_strided(part.shape, part.strides, part.offset) for part in parts]


def _part(tensor: torch.Tensor, size: int, bucket: int) -> BlockPart:
    rows = size * (len(tensor) // bucket)
    return BlockPart(tensor.dtype, (rows, *tensor.shape[1:]), tensor.stride(), int(tensor.storage_offset()))


class Buffers:
    """Static tensors by name, each between two guards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._guards: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # before and behind each tensor

    def like(self, name: str, state: _State) -> _State:
        """Make static tensors with a copy of every tensor of a state."""
        copies = {}
        for field_ in fields(state):
            value = getattr(state, field_.name)
            path = f"{name}.{field_.name}"
            if isinstance(value, State):
                copies[field_.name] = self.like(path, value)
            elif isinstance(value, torch.Tensor):
                copies[field_.name] = self.block({path: value}).tensors[path]
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


def pad(state: _State) -> _State:
    """Fill every tensor of a state in place, as for padded requests, and return the state."""
    for name, tensor in state.tensors.items():
        tensor.fill_(PADDING.get(name, 0))
    return state


def load(static: State, state: State) -> None:
    """Copy a state into the first rows of its static buffers and pad the rest.

    Buffers of fields that hold no tensor stay as they are.
    """
    for field_ in fields(state):
        value = getattr(state, field_.name)
        buffer = getattr(static, field_.name)
        if isinstance(value, State):
            load(buffer, value)
        elif isinstance(value, torch.Tensor):
            fill(buffer, value, field_.name)


def fill(buffer: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Copy a field's tensor into the first rows of its static buffer and pad the rest."""
    size = len(value)
    if size == len(buffer):
        buffer.copy_(value)
    else:
        buffer[:size].copy_(value)
        buffer[size:].fill_(PADDING.get(name, 0))


def unload(static: _State, size: int, bucket: int) -> _State:
    """Copy the part of the first `size` of `bucket` requests."""
    copies = {}
    for field_ in fields(static):
        value = getattr(static, field_.name)
        if isinstance(value, State):
            copies[field_.name] = unload(value, size, bucket)
        elif isinstance(value, torch.Tensor):
            copies[field_.name] = value[: size * (len(value) // bucket)].clone()
    return replace(static, **copies)


def load_extend_input(static: DraftExtendInput, state: DraftExtendInput, width: int) -> None:
    """Copy a state with any number of rows for each request into buffers with `width`.

    Missing rows write nothing.
    """
    counts = state.row_starts.diff()
    starts = width * torch.arange(len(counts), device=counts.device)
    shifts = (starts - state.row_starts[:-1]).repeat_interleave(counts)
    rows = torch.arange(len(state.input_ids), device=counts.device) + shifts
    for name, value in state.tensors.items():
        if name != "row_starts":
            buffer = getattr(static, name)
            buffer.fill_(PADDING.get(name, 0))
            buffer[rows if name in _ROW_FIELDS else slice(len(value))] = value


def unload_extend_input(static: DraftExtendInput, size: int, width: int, extend: str) -> DraftExtendInput:
    """Copy the first `size` requests' rows, only the accepted ones in mode `ragged`."""
    counts = static.num_accepted_tokens[:size].long()
    counts = counts if extend == "ragged" else torch.full_like(counts, width)
    accepted = (torch.arange(width, device=counts.device) < counts[:, None]).flatten().nonzero()[:, 0]
    copies = {
        name: value[accepted] if name in _ROW_FIELDS else value[:size].clone() for name, value in static.tensors.items()
    }
    return DraftExtendInput(**copies | {"row_starts": torch.nn.functional.pad(counts.cumsum(0), (1, 0))})
