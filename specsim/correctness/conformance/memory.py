"""Where the tensors of a call lie: each in memory of its own, on the device, between entries that nobody may write."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MARGIN = 64  # entries before and after; a multiple of what vector loads are aligned to


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in memory of its own. before: its entries when it was placed; whole: the memory, with the margins.

    Whoever is given the tensor may have resized it since; strides are those it was placed with.
    """

    tensor: torch.Tensor
    strides: tuple[int, ...]
    before: torch.Tensor
    whole: torch.Tensor
    whole_before: torch.Tensor

    @property
    def is_overrun(self) -> bool:
        """Whether something beside the tensor was written."""
        now, then = self.whole.clone(), self.whole_before.clone()
        for memory in (now, then):
            memory.as_strided(self.before.shape, self.strides, MARGIN).zero_()
        return not torch.equal(bits(now), bits(then))

    @property
    def is_moved(self) -> bool:
        """Whether the tensor lies in other memory now."""
        return self.tensor.numel() > 0 and self.tensor.data_ptr() != self.whole[MARGIN:].data_ptr()

    @property
    def is_changed(self) -> bool:
        """Whether its dtype, its shape or one of its entries is another now."""
        return self.tensor.dtype != self.before.dtype or not torch.equal(bits(self.tensor), bits(self.before))


def place(tensor: torch.Tensor, device: torch.device) -> Placed:
    """A copy on the device, strides and all."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.new_zeros((reach if tensor.numel() else 0) + 2 * MARGIN)
    fill, wide = (float("nan"), torch.float64) if tensor.is_floating_point() else (1, torch.int64)
    whole.copy_(tensor.new_full(whole.shape, fill, dtype=wide))
    whole.as_strided(tensor.shape, tensor.stride(), MARGIN).copy_(tensor)
    whole = whole.to(device)
    placed = whole.as_strided(tensor.shape, tensor.stride(), MARGIN)
    return Placed(placed, placed.stride(), placed.clone(), whole, whole.clone())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its entries as integers, so that NaN equals itself and every type can be compared."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(same)


def place_all(value: Any, device: torch.device) -> Any:
    """Every tensor of an argument placed, in lists and namespaces, too; what is no tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return place(value, device)
    if isinstance(value, list):
        return [place_all(each, device) for each in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: place_all(each, device) for name, each in vars(value).items()})
    return value


def tensors(value: Any) -> Any:
    """The argument as it is handed over, its lists and namespaces new ones."""
    if isinstance(value, Placed):
        return value.tensor
    if isinstance(value, list):
        return [tensors(each) for each in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: tensors(each) for name, each in vars(value).items()})
    return value


def pieces(value: Any) -> list[Placed]:
    """The placed tensors of an argument."""
    if isinstance(value, Placed):
        return [value]
    inside = vars(value).values() if isinstance(value, SimpleNamespace) else value if isinstance(value, list) else ()
    return [placed for each in inside for placed in pieces(each)]


def outline(value: Any) -> Any:
    """What lists, dictionaries and namespaces hold, to be compared later: numbers by value, all else by identity."""
    if isinstance(value, SimpleNamespace):
        return outline(vars(value))
    if isinstance(value, dict):
        return {name: outline(each) for name, each in value.items()}
    if isinstance(value, list):
        return [outline(each) for each in value]
    return value if isinstance(value, int) else id(value)
