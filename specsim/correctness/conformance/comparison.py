"""Comparison of results with the expected ones, up to the first difference."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from specsim.correctness.conformance.case import Call, Distribution
from specsim.correctness.conformance.contract import Value
from specsim.correctness.conformance.memory import bits

FALSE_ALARM = 1e-9  # bound on the probability that a correct sampler fails


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference in a result."""

    result: str  # its name
    index: tuple[int, ...] | None  # of the first wrong element, None for the whole result
    expected: str
    found: str
    count: int = 1  # number of wrong elements

    def __str__(self) -> str:
        place = "" if self.index is None else str(list(self.index))
        more = "" if self.count == 1 else f" ({self.count} elements differ)"
        return f"{self.result}{place}: expected {self.expected}, found {self.found}{more}"


def difference(value: Value, found: Any, call: Call) -> Difference | None:
    """Find the first difference between a result and the call's expectation; None without any."""
    if value.name not in call.expected:
        return None
    expected = call.expected[value.name]
    if isinstance(expected, list):
        pairs = enumerate(zip(expected, found, strict=True))
        every = (_of_tensors(f"{value.name}[{place}]", *pair, call.tolerance, None) for place, pair in pairs)
        return next((each for each in every if each is not None), None)
    if not isinstance(found, torch.Tensor):
        return Difference(value.name, None, "a tensor", type(found).__name__)
    if isinstance(expected, Distribution):
        return _of_samples(value.name, expected, found)
    tolerance = call.tolerance if value.match == "close" else None
    return _of_tensors(value.name, expected, found, tolerance, call.rows.get(value.name))


def _of_tensors(
    name: str, expected: torch.Tensor, found: torch.Tensor, tolerance: float | None, rows: torch.Tensor | None
) -> Difference | None:
    form = _of_form(name, expected, found)
    if form is not None:
        return form
    found = found.cpu()
    wrong = _wrong(expected, found, tolerance)
    if rows is not None:
        wrong &= rows.view(-1, *[1] * (wrong.dim() - 1))
    places = wrong.nonzero()
    if not len(places):
        return None
    index = tuple(places[0].tolist())
    return Difference(name, index, _shown(expected, index), _shown(found, index), len(places))


def _of_form(name: str, expected: torch.Tensor | Distribution, found: torch.Tensor) -> Difference | None:
    """Compare layout, dtype and shape."""
    for what, one, other in (
        ("layout", torch.strided, found.layout),
        ("dtype", expected.dtype, found.dtype),
        ("shape", list(expected.shape), list(found.shape)),
    ):
        if one != other:
            return Difference(name, None, f"{what} {one}", f"{what} {other}")
    return None


def _wrong(expected: torch.Tensor, found: torch.Tensor, tolerance: float | None) -> torch.Tensor:
    if not tolerance:
        same = bits(expected) == bits(found)
        if expected.is_floating_point():
            same |= (expected == found) | (expected.isnan() & found.isnan())
        return ~same
    return ~((expected.double() - found.double()).abs() <= tolerance) & ~(expected.isnan() & found.isnan())


def _shown(tensor: torch.Tensor, index: tuple[int, ...]) -> str:
    return str(tensor[index].item())


def _of_samples(name: str, expected: Distribution, found: torch.Tensor) -> Difference | None:
    """Test samples by Chernoff's bound.

    For each of m outcomes, n · KL(share, probability) exceeds log(2m / α) with a probability of at most α / m.
    """
    form = _of_form(name, expected, found)
    if form is not None:
        return form
    rows = [tuple(row) for row in found.tolist()]
    counts = Counter(rows)
    limit = math.log(2 * max(1, len(expected.outcomes)) / FALSE_ALARM)
    for row in rows:
        if row not in expected.outcomes:
            return Difference(name, (rows.index(row),), f"one of {_outcomes(expected)}", str(list(row)), counts[row])
    for row, prob in expected.outcomes.items():
        if len(rows) * _divergence(counts[row] / len(rows), prob) > limit:
            share = f"{list(row)} in {counts[row] / len(rows):.4f} of {len(rows)} rows"
            return Difference(name, None, f"{list(row)} in {prob:.4f}", share)
    return None


def _divergence(share: float, prob: float) -> float:
    """Kullback-Leibler divergence of two Bernoulli distributions, in nats."""
    terms = ((share, prob), (1 - share, 1 - prob))
    return sum(one * math.log(one / other) if other > 0 else math.inf for one, other in terms if one > 0)


def _outcomes(expected: Distribution) -> str:
    shown = [str(list(row)) for row in list(expected.outcomes)[:4]]
    return ", ".join(shown) + (", …" if len(expected.outcomes) > 4 else "")
