"""Copies of states to static buffers and back."""

from dataclasses import fields, replace
from typing import TypeVar

import torch

from specsim.core.phases import DraftExtendInput, State
from specsim.fast.runtime.padding import PADDING

_State = TypeVar("_State", bound=State)
# Fields of DraftExtendInput with an entry for each row rather than each request.
_ROW_FIELDS = ("hidden", "input_ids", "positions", "cache_locations")


def load(static: State, state: State) -> None:
    """Copy a state into the first rows of its static buffers and pad the rest.

    Buffers of fields that hold no tensor stay as they are.
    """
    for each in fields(state):
        value = getattr(state, each.name)
        buffer = getattr(static, each.name)
        if isinstance(value, State):
            load(buffer, value)
        elif isinstance(value, torch.Tensor):
            fill(buffer, value, each.name)


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
    for each in fields(static):
        value = getattr(static, each.name)
        if isinstance(value, State):
            copies[each.name] = unload(value, size, bucket)
        elif isinstance(value, torch.Tensor):
            copies[each.name] = value[: size * (len(value) // bucket)].clone()
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
    static.num_accepted_tokens[len(counts) :].fill_(1)


def unload_extend_input(static: DraftExtendInput, size: int, width: int, extend: str) -> DraftExtendInput:
    """Copy the first `size` requests' rows, only the accepted ones in mode `ragged`."""
    counts = static.num_accepted_tokens[:size].long()
    counts = counts if extend == "ragged" else torch.full_like(counts, width)
    kept = (torch.arange(width, device=counts.device) < counts[:, None]).flatten().nonzero()[:, 0]
    copies = {
        name: value[kept] if name in _ROW_FIELDS else value[:size].clone() for name, value in static.tensors.items()
    }
    return DraftExtendInput(**copies | {"row_starts": torch.nn.functional.pad(counts.cumsum(0), (1, 0))})
