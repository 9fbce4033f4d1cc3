"""Budgets: the distance allowed between two right answers."""

import torch

FLOAT32_EPS = torch.finfo(torch.float32).eps


def budget(
    reference: torch.Tensor, exact: torch.Tensor, eps: float, magnitude: torch.Tensor | float | None = None
) -> float:
    """Bound the error of a correct value of this tensor: 4 max|reference - exact| + 16 eps max|exact|.

    reference has these values in the precision under test, exact in float64, both from the same inputs. Their distance
    is the rounding error of a correct program. Another order of the same sums errs about as much, hence a small
    multiple of it. The second term is for tensors whose reference happens to be right to the last bit. magnitude:
    values that the tensor was computed from, where subtraction made it smaller than they are. The implementation under
    test does not enter the budget.
    """
    scale = exact if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64)
    return 4 * _largest(reference.double() - exact.double()) + 16 * eps * _largest(scale.double())


def rms_budget(reference: torch.Tensor, exact: torch.Tensor, eps: float) -> float:
    """Bound the root mean square of a correct value's errors: twice the reference's plus eps / 2.

    Over many entries the root mean square hardly varies, so this bound is tighter than that of the largest error. In 16
    bits, the largest error's budget would miss a scale that is off by a tenth.
    """
    return 2 * rms(reference.double() - exact.double()) + eps / 2 * rms(exact.double())


def rms(values: torch.Tensor) -> float:
    """Compute the root mean square."""
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def log_prob_budget(reference_logits: torch.Tensor, exact_logits: torch.Tensor, eps: float) -> float:
    """Bound the error of a log probability: that of its logit plus that of the normaliser.

    The normaliser's error is at most the largest error of any logit. All logits are measured, since a few probabilities
    may be right by luck.
    """
    return 2 * budget(reference_logits, exact_logits, eps, max(1.0, _largest(exact_logits)))


def _largest(values: torch.Tensor) -> float:
    """Find the largest finite absolute value; equal infinities (whose difference is NaN) do not count."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
