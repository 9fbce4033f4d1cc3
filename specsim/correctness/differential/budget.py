"""Budgets: the distance allowed between two right answers."""

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
    implementation under test has no say in it.
    """
    scale = exact if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64)
    return 4 * _largest(reference.double() - exact.double()) + 16 * eps * _largest(scale.double())


def rms_budget(reference: torch.Tensor, exact: torch.Tensor, eps: float) -> float:
    """Most that the root mean square of a right value's errors may be: twice the reference's, and half an eps.

    Over many entries it hardly varies, so that it can be held tighter than the largest error: in 16 bits that one's
    budget would let a scale be off by a tenth.
    """
    return 2 * rms(reference.double() - exact.double()) + eps / 2 * rms(exact.double())


def rms(values: torch.Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def log_prob_budget(reference_logits: torch.Tensor, exact_logits: torch.Tensor, eps: float) -> float:
    """Most that the logarithm of a probability may be off: by its logit's error and by that of the normaliser, which is
    at most the largest error of any logit. All logits are measured, since a few probabilities may be right by luck.
    """
    return 2 * budget(reference_logits, exact_logits, eps, max(1.0, _largest(exact_logits)))


def _largest(values: torch.Tensor) -> float:
    """Largest finite absolute value; equal infinities (whose difference is not a number) do not count."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
