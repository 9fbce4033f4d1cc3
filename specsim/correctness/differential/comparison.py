"""Checks of values: each raises at the first difference, and is counted if there is none.

A budget is the distance allowed between two right answers."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from specsim.core.phases import State

FLOAT32_EPS = torch.finfo(torch.float32).eps
ENOUGH = 64  # fewest entries of a meaningful root mean square
T = TypeVar("T")
U = TypeVar("U")


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


@dataclass(eq=False)
class Mismatch(Exception):
    """A field of a request that the implementation under test has wrong."""

    field: str
    reference: Any
    fast: Any
    node: int | None = None


class Trio(NamedTuple, Generic[T]):
    """One value of each of the three implementations."""

    reference: T  # in the precision under test
    exact: T  # the reference in float64
    fast: T  # under test

    def map(self, function: Callable[[T], U]) -> "Trio[U]":
        return Trio(*map(function, self))

    @property
    def agree(self) -> bool:
        """Whether all three are equal; for values that Python compares."""
        return self.fast == self.exact == self.reference


def present(name: str, value: T | None) -> T:
    """Return a field that every state has under this setting; Mismatch where it is missing."""
    if value is None:
        raise Mismatch(f"{name} (type)", "a value", "None")
    return value


@dataclass(slots=True)
class Tally:
    """Result of a cell's comparisons."""

    decisions: int = 0  # choices that were compared
    within_rounding_error: int = 0  # choices that rounding decided
    max_logprob_error: float = 0.0
    budgets: dict[str, float] = field(default_factory=dict)  # of each field, the largest
    # Set where the reference runs with perturbed weights: its errors become budgets.
    is_perturbation: bool = False
    fields: Counter = field(default_factory=Counter)  # comparisons of each field that had entries
    compared: Counter = field(default_factory=Counter)  # by phase, requests that were compared to its end
    not_compared: Counter = field(default_factory=Counter)  # by phase, requests that diverged by rounding
    coverage: Counter = field(default_factory=Counter)  # by name, cases that occurred in what was compared


@dataclass(frozen=True, slots=True)
class FieldChecks:
    """Checks of values; each raises Mismatch at the first difference."""

    tally: Tally
    eps: float  # of the precision under test

    def same(self, name: str, reference: torch.Tensor, fast: torch.Tensor) -> None:
        """Require every entry to be equal, and the same shape and type."""
        self._alike(name, reference, fast)
        self._none_wrong(name, reference, fast, reference != fast)

    def close(self, name: str, values: Trio[torch.Tensor]) -> None:
        """Require every entry of fast to be within the budget around exact; NaN is never close.

        A drafter amplifies errors in one direction, so one row of the reference may be right by luck. The budget is
        therefore the largest that this field has had in the cell, its perturbation runs included.
        """
        self._alike(name, values.reference, values.fast)
        exact = values.exact.double()
        fast = values.fast.double()
        runs = (values.reference, values.fast) if self.tally.is_perturbation else (values.reference,)
        allowed = self._largest(name, (budget(run, exact, self.eps) for run in runs))
        self.within(name, exact, fast, allowed)
        if self.eps > FLOAT32_EPS and exact.numel() >= ENOUGH:
            allowed = self._largest(f"{name} (rms)", (rms_budget(run, exact, self.eps) for run in runs))
            self.require(f"{name} (rms)", rms(fast - exact) <= allowed, allowed, rms(fast - exact))

    def _largest(self, name: str, budgets: Iterable[float]) -> float:
        """Update and return the largest budget of a name so far in the cell."""
        self.tally.budgets[name] = max(*budgets, self.tally.budgets.get(name, 0.0), 0.0)
        return self.tally.budgets[name]

    def within(self, name: str, expected: torch.Tensor, fast: torch.Tensor, allowed: float) -> None:
        """Require every entry to be within a distance that the caller derived."""
        expected = expected.double()
        fast = fast.double()
        self._none_wrong(name, expected, fast, ~((fast == expected) | ((fast - expected).abs() <= allowed)))

    def layout(self, prefix: str, reference: State, fast: State, varying: frozenset[str] = frozenset()) -> None:
        """Require equal shapes and types in a whole state; fields in `varying` may differ in their number of rows."""
        for state_field in fields(reference):  # pyright: ignore[reportArgumentType]  # every State is a dataclass
            name = prefix + state_field.name
            ours = getattr(reference, state_field.name)
            theirs = getattr(fast, state_field.name)
            if type(ours) is not type(theirs):
                raise Mismatch(f"{name} (type)", type(ours).__name__, type(theirs).__name__)
            if isinstance(ours, State):
                self.layout(f"{name}.", ours, theirs, varying)
            elif isinstance(ours, torch.Tensor):
                rows = slice(0) if name in varying else slice(None)
                self._alike(name, ours[rows], theirs[rows])

    def require(self, name: str, holds: bool, reference: Any, fast: Any) -> None:
        """Require a condition to hold exactly."""
        if not holds:
            raise Mismatch(name, reference, fast)
        self.tally.fields[name] += 1

    def decided(self, choices: Trio[Any]) -> bool:
        """Count a correct choice, and check whether all implementations made it.

        Where rounding decided it, they may differ from there on: comparisons return False, and all before is equal.
        """
        self.tally.decisions += 1
        return choices.agree

    def note_logprob_error(self, error: float) -> None:
        """Keep the largest error."""
        self.tally.max_logprob_error = max(self.tally.max_logprob_error, error)

    def _alike(self, name: str, reference: torch.Tensor, fast: torch.Tensor) -> None:
        if reference.shape != fast.shape:
            raise Mismatch(f"{name} (shape)", tuple(reference.shape), tuple(fast.shape))
        if reference.dtype != fast.dtype:
            raise Mismatch(f"{name} (dtype)", str(reference.dtype), str(fast.dtype))

    def _none_wrong(self, name: str, reference: torch.Tensor, fast: torch.Tensor, wrong: torch.Tensor) -> None:
        indices = wrong.nonzero()
        if len(indices):
            index = tuple(indices[0].tolist())
            raise Mismatch(name, reference[index].item(), fast[index].item(), index[0] if index else None)
        self.tally.fields[name] += reference.numel() > 0
