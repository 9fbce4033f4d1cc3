"""Comparison of results with the expected ones, up to the first difference."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from specsim.correctness.conformance.case import Call, SampleDistribution
from specsim.correctness.conformance.contract import Value
from specsim.correctness.conformance.memory import bits

FALSE_ALARM = 1e-9  # bound on the probability that a correct sampler fails


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """A difference in a result."""

    result: str  # its name
    index: tuple[int, ...] | None  # of the first wrong element, None for the whole result
    expected: str
    actual: str
    count: int = 1  # number of wrong elements

    def __str__(self) -> str:
        element = "" if self.index is None else str(list(self.index))
        more = "" if self.count == 1 else f" ({self.count} elements differ)"
        return f"{self.result}{element}: expected {self.expected}, found {self.actual}{more}"


def difference(value: Value, result: Any, call: Call) -> ResultDifference | None:
    """Find the first difference between a result and the call's expectation; None without any."""
    if value.name not in call.expected:
        return None
    expected = call.expected[value.name]
    if isinstance(expected, list):
        pairs = enumerate(zip(expected, result, strict=True))
        differences = (_of_tensors(f"{value.name}[{index}]", *pair, call.tolerance, None) for index, pair in pairs)
        return next((item_difference for item_difference in differences if item_difference is not None), None)
    if not isinstance(result, torch.Tensor):
        return ResultDifference(value.name, None, "a tensor", type(result).__name__)
    if isinstance(expected, SampleDistribution):
        return _of_samples(value.name, expected, result)
    tolerance = call.tolerance if value.match == "close" else None
    return _of_tensors(value.name, expected, result, tolerance, call.rows.get(value.name))


def _of_tensors(
    name: str, expected: torch.Tensor, result: torch.Tensor, tolerance: float | None, rows: torch.Tensor | None
) -> ResultDifference | None:
    form = _of_form(name, expected, result)
    if form is not None:
        return form
    result = result.cpu()
    wrong = _wrong(expected, result, tolerance)
    if rows is not None:
        wrong &= rows.view(-1, *[1] * (wrong.dim() - 1))
    places = wrong.nonzero()
    if not len(places):
        return None
    index = tuple(places[0].tolist())
    return ResultDifference(name, index, _entry(expected, index), _entry(result, index), len(places))


def _of_form(name: str, expected: torch.Tensor | SampleDistribution, result: torch.Tensor) -> ResultDifference | None:
    """Compare layout, dtype and shape."""
    for what, one, other in (
        ("layout", torch.strided, result.layout),
        ("dtype", expected.dtype, result.dtype),
        ("shape", list(expected.shape), list(result.shape)),
    ):
        if one != other:
            return ResultDifference(name, None, f"{what} {one}", f"{what} {other}")
    return None


def _wrong(expected: torch.Tensor, result: torch.Tensor, tolerance: float | None) -> torch.Tensor:
    if not tolerance:
        same = bits(expected) == bits(result)
        if expected.is_floating_point():
            same |= (expected == result) | (expected.isnan() & result.isnan())
        return ~same
    return ~((expected.double() - result.double()).abs() <= tolerance) & ~(expected.isnan() & result.isnan())


def _entry(tensor: torch.Tensor, index: tuple[int, ...]) -> str:
    return str(tensor[index].item())


def _of_samples(name: str, expected: SampleDistribution, result: torch.Tensor) -> ResultDifference | None:
    """Test samples by Chernoff's bound.

    For each of m outcomes, n · KL(share, probability) exceeds log(2m / α) with a probability of at most α / m.
    """
    form = _of_form(name, expected, result)
    if form is not None:
        return form
    rows = [tuple(row) for row in result.tolist()]
    counts = Counter(rows)
    limit = math.log(2 * max(1, len(expected.outcomes)) / FALSE_ALARM)
    for row in rows:
        if row not in expected.outcomes:
            return ResultDifference(
                name, (rows.index(row),), f"one of {_outcomes(expected)}", str(list(row)), counts[row]
            )
    for row, prob in expected.outcomes.items():
        if len(rows) * _divergence(counts[row] / len(rows), prob) > limit:
            share = f"{list(row)} in {counts[row] / len(rows):.4f} of {len(rows)} rows"
            return ResultDifference(name, None, f"{list(row)} in {prob:.4f}", share)
    return None


def _divergence(share: float, prob: float) -> float:
    """Kullback-Leibler divergence of two Bernoulli distributions, in nats."""
    terms = ((share, prob), (1 - share, 1 - prob))
    return sum(one * math.log(one / other) if other > 0 else math.inf for one, other in terms if one > 0)


def _outcomes(expected: SampleDistribution) -> str:
    rows = [str(list(row)) for row in list(expected.outcomes)[:4]]
    return ", ".join(rows) + (", …" if len(expected.outcomes) > 4 else "")
