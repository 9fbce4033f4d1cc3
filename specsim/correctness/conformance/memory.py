"""Memory of a call's tensors: each has its own, between guard entries that must not be written."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MARGIN = 64  # entries before and after a tensor; a multiple of the alignment of vector loads


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in its own memory."""

    tensor: torch.Tensor  # the function may have resized it
    strides: tuple[int, ...]  # with which it was placed
    before: torch.Tensor  # copy of its entries when it was placed
    whole: torch.Tensor  # the memory, with the margins
    whole_before: torch.Tensor  # copy of the memory when it was placed

    @property
    def is_overrun(self) -> bool:
        """Whether a guard entry was written."""
        now = self.whole.clone()
        then = self.whole_before.clone()
        for memory in (now, then):
            memory.as_strided(self.before.shape, self.strides, MARGIN).zero_()
        return not torch.equal(bits(now), bits(then))

    @property
    def is_moved(self) -> bool:
        """Whether the tensor lies in other memory now."""
        return self.tensor.numel() > 0 and self.tensor.data_ptr() != self.whole[MARGIN:].data_ptr()

    @property
    def is_changed(self) -> bool:
        """Whether its dtype, its shape or one of its entries is different now."""
        return self.tensor.dtype != self.before.dtype or not torch.equal(bits(self.tensor), bits(self.before))


def place(tensor: torch.Tensor, device: torch.device) -> Placed:
    """Copy a tensor to the device with its strides."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.new_zeros((reach if tensor.numel() else 0) + 2 * MARGIN)
    fill, wide = (float("nan"), torch.float64) if tensor.is_floating_point() else (1, torch.int64)
    whole.copy_(tensor.new_full(whole.shape, fill, dtype=wide))
    whole.as_strided(tensor.shape, tensor.stride(), MARGIN).copy_(tensor)
    whole = whole.to(device)
    placed = whole.as_strided(tensor.shape, tensor.stride(), MARGIN)
    return Placed(placed, placed.stride(), placed.clone(), whole, whole.clone())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View entries as integers, so that NaN equals itself and every type can be compared."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(same)


def place_all(value: Any, device: torch.device) -> Any:
    """Place every tensor of an argument, also in lists and namespaces; everything else stays."""
    if isinstance(value, torch.Tensor):
        return place(value, device)
    if isinstance(value, list):
        return [place_all(each, device) for each in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: place_all(each, device) for name, each in vars(value).items()})
    return value


def tensors(value: Any) -> Any:
    """Make the argument to pass, with new lists and namespaces."""
    if isinstance(value, Placed):
        return value.tensor
    if isinstance(value, list):
        return [tensors(each) for each in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: tensors(each) for name, each in vars(value).items()})
    return value


def pieces(value: Any) -> list[Placed]:
    """List the placed tensors of an argument."""
    if isinstance(value, Placed):
        return [value]
    inside = vars(value).values() if isinstance(value, SimpleNamespace) else value if isinstance(value, list) else ()
    return [placed for each in inside for placed in pieces(each)]


def outline(value: Any) -> Any:
    """Record lists, dictionaries and namespaces for a comparison: numbers by value, all else by identity."""
    if isinstance(value, SimpleNamespace):
        return outline(vars(value))
    if isinstance(value, dict):
        return {name: outline(each) for name, each in value.items()}
    if isinstance(value, list):
        return [outline(each) for each in value]
    return value if isinstance(value, int) else id(value)
