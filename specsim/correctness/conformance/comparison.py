"""Comparison of results with the expected ones, and guard entries around a call's tensors."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from specsim.correctness.conformance.contract import Call, SampleDistribution, Value

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


FALSE_ALARM = 1e-9  # bound on the probability that a correct sampler fails


@dataclass(frozen=True, slots=True)
class TensorPair:
    """An expected tensor and the one that a function gave, on the host."""

    expected: torch.Tensor
    actual: torch.Tensor
    rows: torch.Tensor | None  # compared rows, bool; None: all
    tolerance: float | None

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Choose the compared rows of a tensor, all of one that does not have these rows."""
        has_rows = self.rows is not None and tensor.shape[:1] == self.rows.flatten().shape
        return tensor[self.rows.flatten()] if self.rows is not None and has_rows else tensor

    def selected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the compared rows of both."""
        return self.select(self.expected), self.select(self.actual)


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """A difference in a result."""

    result: str  # its name
    index: tuple[int, ...] | None  # of the first wrong element, None for the whole result
    expected: str
    actual: str
    count: int = 1  # number of wrong elements
    pair: TensorPair | None = field(default=None, compare=False, repr=False)  # where tensors of one dtype differ

    def __str__(self) -> str:
        element = "" if self.index is None else str(list(self.index))
        more = "" if self.count == 1 else f" ({self.count} elements differ)"
        return f"{self.result}{element}: expected {self.expected}, found {self.actual}{more}"

    @property
    def excerpt(self) -> str:
        """Lines with the indices, the expected and the found values of eight elements around the first wrong one."""
        if self.pair is None or not self.index:
            return ""
        *outer, last = self.index
        rows = [tensor[tuple(outer)].tolist() for tensor in (self.pair.expected, self.pair.actual)]
        start = max(0, min(last - 3, len(rows[0]) - 8))
        columns = [("index", "expected", "found")]
        columns += [
            (str([*outer, start + step]), *map(str, pair))
            for step, pair in enumerate(zip(*(row[start : start + 8] for row in rows), strict=True))
        ]
        widths = [max(map(len, column)) for column in columns]
        lines = (
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
            for line in zip(*columns, strict=True)
        )
        return "\n".join(lines)


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
    if form is not None and form.expected.startswith("shape"):
        return replace(form, pair=TensorPair(expected, result.cpu(), None, tolerance))
    if form is not None:
        return form
    result = result.cpu()
    wrong = mismatches(expected, result, tolerance)
    if rows is not None:
        wrong &= rows.view(-1, *[1] * (wrong.dim() - 1))
    places = wrong.nonzero()
    if not len(places):
        return None
    index = tuple(places[0].tolist())
    pair = TensorPair(expected, result, rows, tolerance)
    return ResultDifference(name, index, _entry(expected, index), _entry(result, index), len(places), pair)


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


def mismatches(expected: torch.Tensor, result: torch.Tensor, tolerance: float | None) -> torch.Tensor:
    """Mark the elements that differ, bool; NaN equals itself. Both have one shape and one dtype."""
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
            index = (rows.index(row),)
            return ResultDifference(name, index, f"one of {_outcomes(expected)}", str(list(row)), counts[row])
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
