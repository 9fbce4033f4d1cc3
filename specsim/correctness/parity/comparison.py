"""First tensor in which an engine differs from the reference, and the wrong readings that would make it equal.

Tensors are compared with the reference in a wider type. An engine may err eight times as much as the reference does in
the dump's type, because another order of the same sums errs about as much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specsim.correctness.parity.readings import Reading, readings
from specsim.correctness.parity.trace import PrefillScene, Tensors

_FACTOR = 8
_NEAR = 16  # budgets within which a reading is worth a whole trace
_OF_LOGITS = ("lm_head", "target_logits", "draft_ids")  # made one row after another in some drafters


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor of an engine against the reference."""

    name: str  # phase and weight
    rows: int  # rows that were compared
    rows_that_differ: int  # rows with a difference beyond the budget
    first_row: int | None  # first of these; None for none
    difference: float  # largest of any number
    budget: float  # largest difference that rounding explains
    is_tie: bool = False  # whether ids differ where two logits are within the budget
    shapes: str = ""  # shapes of both, where they cannot be compared

    @property
    def is_equal(self) -> bool:
        """Check that rounding explains every difference."""
        return not self.shapes and (self.rows_that_differ == 0 or self.is_tie)


@dataclass(frozen=True, slots=True)
class Fit:
    """A wrong reading under which the tensor is equal."""

    reading: str  # in words
    next_difference: str | None  # first tensor that differs under it; None: all are equal


@dataclass(frozen=True, slots=True)
class Parity:
    """Comparison of a dump with the reference."""

    compared: tuple[TensorComparison, ...]  # tensors in their order, up to the first that differs
    first: TensorComparison | None  # first tensor that differs
    between: tuple[str, ...]  # tensors that were not dumped, between the last equal one and that
    fits: tuple[Fit, ...]  # wrong readings that fit, the best first
    num_readings: int  # readings that were tried
    tie: str | None  # ids that differ in a near-tie, after which nothing is compared

    @property
    def is_ok(self) -> bool:
        """Check that rounding explains every difference."""
        return self.first is None


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's tensors in two types."""

    exact: Tensors
    rounded: Tensors
    dtype: torch.dtype  # of `rounded`
    length: int  # rows of the prompt

    @classmethod
    def of(cls, exact: PrefillScene, rounded: PrefillScene) -> "Reference":
        """Run the drafter in both types, with the same token after the prompt."""
        tensors = exact.trace()
        return cls(tensors, rounded.trace(), rounded.dtype, len(tensors["target/features"]))

    def budget(self, name: str, exact: torch.Tensor) -> float:
        """Largest difference that rounding explains."""
        if not exact.is_floating_point():
            return 0.0
        expected = self.exact[name].double()
        error = (
            _distance(expected, self.rounded[name].double())
            if self.rounded[name].shape == expected.shape
            else expected * 0
        )
        scale = float(exact[exact.isfinite()].abs().max())
        return _FACTOR * max(float(error.max()), torch.finfo(self.dtype).eps * scale)

    def compare(self, name: str, theirs: torch.Tensor, tensors: Tensors) -> TensorComparison:
        """Compare one tensor of an engine with that of a trace in the wider type."""
        ours = tensors[name]
        both = _aligned(theirs, ours, self.length)
        if both is None:
            shapes = f"{list(theirs.shape)}, the reference's is {list(ours.shape)}"
            return TensorComparison(name, 0, 0, None, torch.inf, 0.0, shapes=shapes)
        budget = self.budget(name, ours)
        distance_R = _distance(*both).amax(1)
        differs_R = ~(distance_R <= budget)
        count = int(differs_R.sum())
        first = int(differs_R.nonzero()[0]) if count else None
        largest = float(distance_R.nan_to_num(nan=torch.inf).max())
        is_tie = bool(count) and name.endswith("draft_ids") and self._is_tie(name, differs_R)
        return TensorComparison(name, len(differs_R), count, first, largest, budget, is_tie)

    def _is_tie(self, name: str, differs_R: torch.Tensor) -> bool:
        """Check whether the best two logits of each row that differs are as near as rounding."""
        logits = name.replace("draft_ids", "lm_head")
        best = self.exact[logits].double().topk(2).values
        return bool(((best[:, 0] - best[:, 1])[differs_R] <= 2 * self.budget(logits, self.exact[logits])).all())


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Absolute differences; of equal infinities 0."""
    return torch.where(one == other, 0.0, (one - other).abs())


def _aligned(theirs: torch.Tensor, ours: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Bring both to [rows, width] in float64: padding rows dropped, or the last row where one side has only that."""
    if theirs.ndim == 0 or not len(theirs):
        return None
    ours, theirs = (x.double().reshape(len(x), -1) for x in (ours, theirs))
    if ours.shape[1] != theirs.shape[1]:
        return None
    if len(ours) == 1 and len(theirs) > 1:
        theirs = theirs[min(length, len(theirs)) - 1 :][:1]
    elif len(theirs) == 1 and len(ours) > 1:
        ours = ours[-1:]
    theirs = theirs[: len(ours)]
    return None if len(theirs) != len(ours) else (theirs, ours)


def wider(dtype: torch.dtype) -> torch.dtype:
    """Choose the type whose rounding is small against that of a type."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def compare(dump: Mapping[str, torch.Tensor], exact: PrefillScene, rounded: PrefillScene) -> Parity:
    """Compare an engine's tensors, under the reference's names, in the order of computation."""
    reference = Reference.of(exact, rounded)
    order = [name for name in reference.exact if name in dump]
    compared = _until_difference(reference, order, dump, reference.exact)
    last = compared[-1] if compared else None
    tie = last.name if last is not None and last.is_tie else None
    if last is None or last.is_equal:
        return Parity(tuple(compared), None, (), (), 0, tie)
    between = _between(list(reference.exact), [entry.name for entry in compared[:-1]], last.name)
    phase = last.name.partition("/")[0]
    suspects = [name.partition("/")[2] for name in [*between, last.name]]
    tried = zip(readings(exact, phase, suspects), readings(rounded, phase, suspects), strict=True)
    tests = [_fit(Readings(*both), exact, rounded, reference, dump, last.name) for both in tried]
    order_of = {name: index for index, name in enumerate(order)}
    fits = [fit for fit in tests if fit is not None]
    fits.sort(key=lambda fit: -order_of.get(fit.next_difference or "", len(order)))
    return Parity(tuple(compared), last, tuple(between), tuple(fits), len(tests), tie)


def _until_difference(
    reference: Reference, order: Sequence[str], dump: Mapping[str, torch.Tensor], tensors: Tensors
) -> list[TensorComparison]:
    """Compare tensors up to the first that differs, or up to ids in a near-tie."""
    compared: list[TensorComparison] = []
    for name in order:
        compared.append(reference.compare(name, dump[name], tensors))
        if not compared[-1].is_equal or compared[-1].is_tie:
            break
    return compared


def _between(names: Sequence[str], equal: Sequence[str], first: str) -> list[str]:
    start = names.index(equal[-1]) + 1 if equal else 0
    phase = first.partition("/")[0]
    return [name for name in names[start : names.index(first)] if name.partition("/")[0] == phase]


class Readings(NamedTuple):
    """One wrong reading in two types."""

    exact: Reading
    rounded: Reading


def _fit(
    reading: Readings, exact: PrefillScene, rounded: PrefillScene, reference: Reference, dump: Tensors, first: str
) -> Fit | None:
    """Check whether a reading makes the first tensor that differs equal, and those before it.

    Under a reading rounding may err more than without, so that the tensors get budgets of their own.
    """
    last = None if first.endswith(_OF_LOGITS) else first
    try:
        near = reference.compare(first, dump[first], exact.trace(reading.exact.drafter_input, last))
        if near.shapes or near.difference > _NEAR * near.budget:
            return None
        changed = Reference(
            exact.trace(reading.exact.drafter_input),
            rounded.trace(reading.rounded.drafter_input),
            reference.dtype,
            reference.length,
        )
    except (KeyError, RuntimeError, IndexError):  # a reading that this checkpoint does not allow
        return None
    order = [name for name in changed.exact if name in dump]
    end = _until_difference(changed, order, dump, changed.exact)[-1]
    if end.is_equal:
        return Fit(reading.exact.says, None)
    return Fit(reading.exact.says, end.name) if order.index(end.name) > order.index(first) else None
