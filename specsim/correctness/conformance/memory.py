"""Memory of a call's tensors: each has its own, between guard entries that must not be written."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MARGIN = 64  # entries before and after a tensor; a multiple of the alignment of vector loads


@dataclass(frozen=True, slots=True)
class GuardedTensor:
    """A tensor between guard entries."""

    tensor: torch.Tensor  # the function may have resized it
    strides: tuple[int, ...]  # of the copy
    before: torch.Tensor  # copy of its entries from before the call
    memory: torch.Tensor  # the tensor with its margins
    memory_before: torch.Tensor  # copy of the memory from before the call

    @property
    def is_overrun(self) -> bool:
        """Whether a guard entry was written."""
        now = self.memory.clone()
        then = self.memory_before.clone()
        for copy in (now, then):
            copy.as_strided(self.before.shape, self.strides, MARGIN).zero_()
        return not torch.equal(bits(now), bits(then))

    @property
    def is_moved(self) -> bool:
        """Whether the tensor lies in other memory now."""
        return self.tensor.numel() > 0 and self.tensor.data_ptr() != self.memory[MARGIN:].data_ptr()

    @property
    def is_changed(self) -> bool:
        """Whether its dtype, its shape or one of its entries is different now."""
        return self.tensor.dtype != self.before.dtype or not torch.equal(bits(self.tensor), bits(self.before))


def guard(tensor: torch.Tensor, device: torch.device) -> GuardedTensor:
    """Copy a tensor to the device with its strides, between guard entries."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_zeros((reach if tensor.numel() else 0) + 2 * MARGIN)
    fill, wide = (float("nan"), torch.float64) if tensor.is_floating_point() else (1, torch.int64)
    memory.copy_(tensor.new_full(memory.shape, fill, dtype=wide))
    memory.as_strided(tensor.shape, tensor.stride(), MARGIN).copy_(tensor)
    memory = memory.to(device)
    guarded = memory.as_strided(tensor.shape, tensor.stride(), MARGIN)
    return GuardedTensor(guarded, guarded.stride(), guarded.clone(), memory, memory.clone())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View entries as integers, so that NaN equals itself and every type can be compared."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(same)


def guard_all(value: Any, device: torch.device) -> Any:
    """Guard every tensor of an argument, also in lists and namespaces; everything else stays."""
    if isinstance(value, torch.Tensor):
        return guard(value, device)
    if isinstance(value, list):
        return [guard_all(item, device) for item in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: guard_all(item, device) for name, item in vars(value).items()})
    return value


def tensors(value: Any) -> Any:
    """Make the argument to pass, with new lists and namespaces."""
    if isinstance(value, GuardedTensor):
        return value.tensor
    if isinstance(value, list):
        return [tensors(item) for item in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: tensors(item) for name, item in vars(value).items()})
    return value


def pieces(value: Any) -> list[GuardedTensor]:
    """List the guarded tensors of an argument."""
    if isinstance(value, GuardedTensor):
        return [value]
    inside = vars(value).values() if isinstance(value, SimpleNamespace) else value if isinstance(value, list) else ()
    return [guarded for item in inside for guarded in pieces(item)]


def outline(value: Any) -> Any:
    """Record lists, dictionaries and namespaces for a comparison: numbers by value, all else by identity."""
    if isinstance(value, SimpleNamespace):
        return outline(vars(value))
    if isinstance(value, dict):
        return {name: outline(item) for name, item in value.items()}
    if isinstance(value, list):
        return [outline(item) for item in value]
    return value if isinstance(value, int) else id(value)
