"""Recognition of wrong results: not written, stale, transposed, shifted by one place, or off by one."""

from collections.abc import Mapping
from itertools import combinations

import torch

from specsim.correctness.conformance.comparison import TensorPair, mismatches


def patterns(pair: TensorPair, others: Mapping[str, torch.Tensor]) -> list[str]:
    """List the forms of a wrong result, each in a clause.

    others: tensors that it may be a copy of, by description. A constant result is no copy, except of its own content
    from before the call.
    """
    expected, actual = pair.selected()
    clauses = [
        words
        for words, other in others.items()
        if (words == NOT_WRITTEN or _varies(actual)) and _is_same(pair.select(other), actual, pair.tolerance)
    ]
    for one, two in combinations(range(expected.dim()), 2):
        if _is_same(expected.transpose(one, two).flatten(), actual.flatten(), pair.tolerance):
            clauses.append(f"transposed: axes {one} and {two} are exchanged")
    if expected.shape == actual.shape:
        wrong = mismatches(expected, actual, pair.tolerance)
        clauses += [*_off_by_one(expected, actual, wrong), *_shifted(expected, actual, wrong, pair.tolerance)]
    return clauses


NOT_WRITTEN = "not written: its content from before the call"


def _is_same(one: torch.Tensor, other: torch.Tensor, tolerance: float | None) -> bool:
    has_same_form = (one.shape, one.dtype) == (other.shape, other.dtype)
    return has_same_form and one.numel() > 0 and not mismatches(one, other, tolerance).any()


def _varies(tensor: torch.Tensor) -> bool:
    return tensor.unique().numel() > 1


def _off_by_one(expected: torch.Tensor, actual: torch.Tensor, wrong: torch.Tensor) -> list[str]:
    if expected.is_floating_point() or expected.dtype == torch.bool:
        return []
    steps = (actual.long() - expected.long())[wrong].unique().tolist()
    return [
        f"off by one: every wrong element is one {word}"
        for word, step in (("more", 1), ("less", -1))
        if steps == [step]
    ]


def _shifted(expected: torch.Tensor, actual: torch.Tensor, wrong: torch.Tensor, tolerance: float | None) -> list[str]:
    """Find the axis along which wrong elements have their neighbour's value: three of four, and truth values all."""
    clauses = []
    for axis, size in enumerate(expected.shape):
        for side, of_actual, of_expected in (("before", 1, 0), ("after", 0, 1)):
            if size < 3:
                continue
            now, neighbour, is_wrong = (
                tensor.narrow(axis, start, size - 1)
                for tensor, start in ((actual, of_actual), (expected, of_expected), (wrong, of_actual))
            )
            fits = is_wrong & ~mismatches(neighbour, now, tolerance)
            total, count = int(is_wrong.sum()), int(fits.sum())
            is_clear = count == total >= 8 if expected.dtype == torch.bool else count >= max(2, 0.75 * total)
            if is_clear and _varies(now[fits]):
                clauses.append(f"shifted: {count} elements have what the place {side} them on axis {axis} should have")
    return clauses
