"""How far two right answers may lie apart."""

import torch

FLOAT32_EPS = torch.finfo(torch.float32).eps


def budget(
    reference: torch.Tensor, exact: torch.Tensor, eps: float, magnitude: torch.Tensor | float | None = None
) -> float:
    """Most that a right value of this tensor differs from exact's: 4 max|reference - exact| + 16 eps max|exact|.

    reference computed the same values in the precision under test and exact in float64 from the same inputs, so their
    distance is the rounding error of a correct program; another order of the same sums errs about as much, hence a
    small multiple of it. The second term is for tensors whose reference happens to be right to the last bit. magnitude:
    the values that the tensor was computed from, where subtraction has made it smaller than what was rounded. The
    column under test has no say in it.
    """
    scale = exact if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64)
    return 4 * _largest(reference.double() - exact.double()) + 16 * eps * _largest(scale.double())


def _largest(values: torch.Tensor) -> float:
    """Largest finite absolute value; equal infinities (whose difference is not a number) do not count."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
