"""The first place where a result is not what it has to be."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from specsim.correctness.conformance.case import Call, Law
from specsim.correctness.conformance.contract import Value
from specsim.correctness.conformance.memory import bits

FALSE_ALARM = 1e-9  # most a law's comparison may fail by chance


@dataclass(frozen=True, slots=True)
class Difference:
    """result: whose. index: of the first wrong element, None where it is the whole. count: how many are wrong."""

    result: str
    index: tuple[int, ...] | None
    expected: str
    found: str
    count: int = 1

    def __str__(self) -> str:
        place = "" if self.index is None else str(list(self.index))
        more = "" if self.count == 1 else f" ({self.count} elements differ)"
        return f"{self.result}{place}: expected {self.expected}, found {self.found}{more}"


def difference(value: Value, found: Any, call: Call) -> Difference | None:
    """The first difference of a result from what the call expects; None where there is none or nothing is expected."""
    if value.name not in call.expected:
        return None
    expected = call.expected[value.name]
    if isinstance(expected, list):
        pairs = [(f"{value.name}[{place}]", *pair) for place, pair in enumerate(zip(expected, found, strict=True))]
        every = (_of_tensors(name, one, other, call.tolerance, None) for name, one, other in pairs)
        return next((each for each in every if each is not None), None)
    if not isinstance(found, torch.Tensor):
        return Difference(value.name, None, "a tensor", type(found).__name__)
    if isinstance(expected, Law):
        return _of_law(value.name, expected, found)
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


def _of_form(name: str, expected: torch.Tensor | Law, found: torch.Tensor) -> Difference | None:
    """Before entries are compared: layout, dtype, shape."""
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


def _of_law(name: str, law: Law, found: torch.Tensor) -> Difference | None:
    """Chernoff's bound: n · KL(share, chance) of an outcome, of m, exceeds log(2m / α) in at most α / m of runs."""
    form = _of_form(name, law, found)
    if form is not None:
        return form
    rows = [tuple(row) for row in found.tolist()]
    counts, limit = Counter(rows), math.log(2 * max(1, len(law.outcomes)) / FALSE_ALARM)
    for row in rows:
        if row not in law.outcomes:
            return Difference(name, (rows.index(row),), f"one of {_outcomes(law)}", str(list(row)), counts[row])
    for row, chance in law.outcomes.items():
        if len(rows) * _divergence(counts[row] / len(rows), chance) > limit:
            share = f"{list(row)} in {counts[row] / len(rows):.4f} of {len(rows)} rows"
            return Difference(name, None, f"{list(row)} in {chance:.4f}", share)
    return None


def _divergence(share: float, chance: float) -> float:
    """Of two uniforms, Kullback-Leibler, in nats."""
    terms = ((share, chance), (1 - share, 1 - chance))
    return sum(one * math.log(one / other) if other > 0 else math.inf for one, other in terms if one > 0)


def _outcomes(law: Law) -> str:
    shown = [str(list(row)) for row in list(law.outcomes)[:4]]
    return ", ".join(shown) + (", …" if len(law.outcomes) > 4 else "")
