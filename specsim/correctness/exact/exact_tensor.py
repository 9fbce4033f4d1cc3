"""Tensors of exact numbers, with the methods and functions of torch that an acceptance rule is likely to use.

It is a numpy array of objects, whose indexing, broadcasting and arithmetic are those of torch.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specsim.correctness.exact.exact_number import ExactNumber, NotExact, lifted

_Array: Any = np.ndarray  # its methods have other parameters than those of torch
_ALIASES = {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "clip": "clamp"}


# Methods of numpy that are those of torch; others of the same name may differ.
_SHARED = frozenset("shape ndim dtype T reshape flatten ravel copy tolist item transpose squeeze flat prod".split())


def _binary(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Make a method of an operation on each pair of numbers."""
    return lambda self, other: operation(self, other)


class ExactTensor(_Array):
    """An array of exact numbers, or of booleans or integers that were computed from them."""

    def __getattribute__(self, name: str) -> Any:
        """Look up an attribute, but none of numpy that means another in torch."""
        if not name.startswith("_") and name not in _SHARED and name not in ExactTensor.__dict__:
            raise AttributeError(f"exact tensors have no {name}")
        return super().__getattribute__(name)

    @classmethod
    def of(cls, values: Any) -> Any:
        """Make an array of numbers, of nested lists of them, or of a tensor."""
        if isinstance(values, cls):
            return values
        array = np.asarray(values.tolist() if isinstance(values, torch.Tensor) else values)
        if array.dtype.kind in "fO":
            lift: Callable[[Any], ExactNumber | None] = lifted
            array = np.array([lift(number) for number in array.flat], dtype=object).reshape(array.shape)
        return array.view(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer torch.minimum(p, q) and the like by the method of that name."""
        name = func.__name__
        name = _ALIASES.get(name, name)
        arguments = [cls.of(argument) if isinstance(argument, torch.Tensor) else argument for argument in args]
        method = getattr(cls, name, None)
        if method is None:
            raise NotExact(f"it calls torch.{name}, which has no exact counterpart")
        if name != "where" and not isinstance(arguments[0], cls):
            arguments[0] = cls.of(arguments[0])
        return method(*arguments, **(kwargs or {}))

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.dtype == object:
            value = ExactTensor.of(value)
            value = value[()] if value.ndim == 0 else value
        super().__setitem__(_plain(key), value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_plain(key))

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __bool__(self) -> bool:
        return bool(self.item())

    # Copies and shapes.

    def clone(self) -> Any:
        """Copy the numbers."""
        return self.copy()

    def double(self) -> Any:
        """Return the numbers, which are exact."""
        return self

    def to(self, *_: Any, **__: Any) -> Any:
        """Return the numbers, which have no other form."""
        return self

    def numel(self) -> int:
        """Count the numbers."""
        return math.prod(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def unsqueeze(self, dim: int) -> Any:
        """Add a dimension of one element."""
        return np.expand_dims(self, dim)

    def zeros_like(self) -> Any:
        """Make zeros of the same shape."""
        return ExactTensor.of(np.zeros(self.shape))

    def ones_like(self) -> Any:
        """Make ones of the same shape."""
        return ExactTensor.of(np.ones(self.shape))

    # Element by element.

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        """Limit every number to a range."""
        limited = self if min is None else self.maximum(min)
        return limited if max is None else limited.minimum(max)

    def clamp_min(self, min: Any) -> Any:
        """Limit every number from below."""
        return self.maximum(min)

    def clamp_max(self, max: Any) -> Any:
        """Limit every number from above."""
        return self.minimum(max)

    def relu(self) -> Any:
        """Replace negative numbers by 0."""
        return self.maximum(0)

    def minimum(self, other: Any) -> Any:
        """Choose the smaller of each pair."""
        return ExactTensor.where(self < other, self, other)

    def maximum(self, other: Any) -> Any:
        """Choose the larger of each pair."""
        return ExactTensor.where(self > other, self, other)

    @staticmethod
    def where(condition: Any, chosen: Any, other: Any) -> Any:
        """Choose from one of two arrays."""
        parts = np.broadcast_arrays(condition, ExactTensor.of(chosen), ExactTensor.of(other), subok=False)
        picked = [yes if is_chosen else no for is_chosen, yes, no in zip(*(part.flat for part in parts), strict=True)]
        return ExactTensor.of(np.array(picked, dtype=object).reshape(parts[0].shape))

    def masked_fill(self, mask: Any, value: Any) -> Any:
        """Replace the numbers under a mask."""
        return ExactTensor.where(mask, value, self)

    def abs(self) -> Any:
        """Make every number positive."""
        return abs(self)

    mul, add, sub, div = map(_binary, (operator.mul, operator.add, operator.sub, operator.truediv))
    gt, lt, ge, le = map(_binary, (operator.gt, operator.lt, operator.ge, operator.le))

    def rsub(self, other: Any) -> Any:
        """Subtract from another."""
        return other - self

    # Along a dimension; numpy calls it axis.

    def sum(self, dim: int | None = None, keepdim: bool = False, **others: Any) -> Any:
        """Add the numbers up."""
        return super().sum(axis=others.get("axis", dim), keepdims=keepdim)

    def cumsum(self, dim: int = -1, **others: Any) -> Any:
        """Add up all numbers before each, and itself."""
        return super().cumsum(axis=others.get("axis", dim))

    def any(self, dim: int | None = None, **_: Any) -> Any:
        """Check whether any is true."""
        return super().any(axis=dim)

    def all(self, dim: int | None = None, **_: Any) -> Any:
        """Check whether all are true."""
        return super().all(axis=dim)

    def max(self, **others: Any) -> Any:
        """Find the largest of all numbers."""
        _refuse_dimension("max", others)
        return max(self.flat)

    def min(self, **others: Any) -> Any:
        """Find the smallest of all numbers."""
        _refuse_dimension("min", others)
        return min(self.flat)

    def argmax(self, dim: int | None = None, **_: Any) -> Any:
        """Find the index of the largest, ties to the lower index."""
        return super().argmax(axis=dim)

    def argmin(self, dim: int | None = None, **_: Any) -> Any:
        """Find the index of the smallest, ties to the lower index."""
        return super().argmin(axis=dim)

    def nonzero(self) -> Any:
        """List the indices of what is true or not 0, [n, dimensions]."""
        return np.argwhere(np.asarray(self, dtype=bool)).view(type(self))

    # Last, as annotations above use the names.

    float = detach = cpu = contiguous = double

    def bool(self) -> Any:
        """Compare with 0."""
        return self != 0


def _plain(key: Any) -> Any:
    """Make an index that numpy takes of one that may hold tensors."""
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, torch.Tensor):
        return key.numpy()
    return np.asarray(key) if isinstance(key, (ExactTensor, Sequence)) and not isinstance(key, str) else key


def _refuse_dimension(name: str, others: dict[str, Any]) -> None:
    if any(others.get(key) is not None for key in ("dim", "axis")):
        raise NotExact(f"it calls {name} along a dimension, which has no exact counterpart")
