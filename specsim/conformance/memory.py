"""Where the tensors of a call lie: each in memory of its own, on the device, between entries that nobody may write."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MARGIN = 64  # entries before and after; a multiple of what vector loads are aligned to


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in memory of its own. before: its entries when it was placed; whole: the memory, with the margins."""

    tensor: torch.Tensor
    before: torch.Tensor
    whole: torch.Tensor
    whole_before: torch.Tensor

    @property
    def is_overrun(self) -> bool:
        """Whether something beside the tensor was written."""
        now, then = self.whole.clone(), self.whole_before.clone()
        for memory in (now, then):
            self._view(memory).zero_()
        return not torch.equal(bits(now), bits(then))

    @property
    def is_changed(self) -> bool:
        """Whether one of its entries is another now."""
        return not torch.equal(bits(self.tensor), bits(self.before))

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.as_strided(self.tensor.shape, self.tensor.stride(), MARGIN)


def place(tensor: torch.Tensor, device: torch.device) -> Placed:
    """A copy on the device, strides and all."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    whole = torch.zeros((reach if tensor.numel() else 0) + 2 * MARGIN, dtype=tensor.dtype)
    fill = float("nan") if tensor.is_floating_point() else 1
    whole.copy_(torch.full(whole.shape, fill, dtype=torch.float64 if tensor.is_floating_point() else torch.int64))
    whole.as_strided(tensor.shape, tensor.stride(), MARGIN).copy_(tensor)
    whole = whole.to(device)
    placed = whole.as_strided(tensor.shape, tensor.stride(), MARGIN)
    return Placed(placed, placed.clone(), whole, whole.clone())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its entries as integers, so that NaN equals itself and every type can be compared."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(same)


def place_all(value: Any, device: torch.device) -> Any:
    """Every tensor of an argument placed; lists stay lists, and what is no tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return place(value, device)
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [place(each, device) for each in value]
    if isinstance(value, SimpleNamespace):
        moved = {name: each.to(device) for name, each in vars(value).items() if isinstance(each, torch.Tensor)}
        return SimpleNamespace(**vars(value) | moved)
    return value


def tensors(value: Any) -> Any:
    """The argument as it is handed over."""
    if isinstance(value, Placed):
        return value.tensor
    return [each.tensor for each in value] if isinstance(value, list) and _is_placed(value) else value


def pieces(value: Any) -> list[Placed]:
    """The placed tensors of an argument."""
    return (
        [value] if isinstance(value, Placed) else list(value) if isinstance(value, list) and _is_placed(value) else []
    )


def _is_placed(value: list) -> bool:
    return bool(value) and isinstance(value[0], Placed)
