"""Comparing one request in one phase: a check raises at the first difference, and counts itself if there is none."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from specsim.core.phases import State
from specsim.correctness.differential.budget import FLOAT32_EPS, budget, rms, rms_budget
from specsim.correctness.differential.divergence import Mismatch, Undecidable

ENOUGH = 64  # entries for a root mean square that hardly varies
T = TypeVar("T")
U = TypeVar("U")


class Trio(NamedTuple, Generic[T]):
    """The same thing of the reference in the precision under test, of the reference in float64, of the fast column."""

    reference: T
    exact: T
    fast: T

    def map(self, function: Callable[[T], U]) -> "Trio[U]":
        return Trio(*map(function, self))


def present(name: str, value: T | None) -> T:
    """Give a field that every state has under this setting; Mismatch where it is missing."""
    if value is None:
        raise Mismatch(f"{name} (type)", "a value", "None")
    return value


@dataclass(slots=True)
class Tally:
    """Result of a cell's comparisons.

    decisions: choices that were compared; undecidable: those that rounding decided. budgets: the largest of each field.
    fields: how often each field was compared and had entries. compared, left_out: requests a phase (all of it compared,
    or only what came before an undecidable choice). exercised: situations met in what was compared. is_rehearsal: the
    third column is the reference too, with weights moved by a unit in the last place, and only its errors are of
    interest, as budgets.
    """

    decisions: int = 0
    undecidable: int = 0
    max_logprob_error: float = 0.0
    budgets: dict[str, float] = field(default_factory=dict)
    is_rehearsal: bool = False
    fields: Counter = field(default_factory=Counter)
    compared: Counter = field(default_factory=Counter)
    left_out: Counter = field(default_factory=Counter)
    exercised: Counter = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The checks. eps: of the precision under test."""

    tally: Tally
    eps: float

    def same(self, name: str, reference: torch.Tensor, fast: torch.Tensor) -> None:
        """Every entry equal, and shape and type with them."""
        self._alike(name, reference, fast)
        self._none_wrong(name, reference, fast, reference != fast)

    def close(self, name: str, values: Trio[torch.Tensor]) -> None:
        """Every entry of fast within the budget of exact's; not a number is never close.

        Errors that a drafter amplifies point in one direction, so that one row of the reference may be right by luck:
        the budget is the largest that this field has had in the cell, its rehearsals included.
        """
        self._alike(name, values.reference, values.fast)
        exact = values.exact.double()
        fast = values.fast.double()
        right = (values.reference, values.fast) if self.tally.is_rehearsal else (values.reference,)
        allowed = self._largest(name, (budget(each, exact, self.eps) for each in right))
        self.within(name, exact, fast, allowed)
        if self.eps > FLOAT32_EPS and exact.numel() >= ENOUGH:
            allowed = self._largest(f"{name} (rms)", (rms_budget(each, exact, self.eps) for each in right))
            self.require(f"{name} (rms)", rms(fast - exact) <= allowed, allowed, rms(fast - exact))

    def _largest(self, name: str, budgets: Iterable[float]) -> float:
        """The largest budget of a name so far in the cell."""
        self.tally.budgets[name] = max(*budgets, self.tally.budgets.get(name, 0.0), 0.0)
        return self.tally.budgets[name]

    def within(self, name: str, expected: torch.Tensor, fast: torch.Tensor, allowed: float) -> None:
        """Every entry within a distance that was derived otherwise."""
        expected = expected.double()
        fast = fast.double()
        self._none_wrong(name, expected, fast, ~((fast == expected) | ((fast - expected).abs() <= allowed)))

    def layout(self, prefix: str, reference: State, fast: State, varying: frozenset[str] = frozenset()) -> None:
        """Shapes and types of a whole state; of the varying fields, whose rows depend on the choices, the type."""
        for each in fields(reference):  # pyright: ignore[reportArgumentType]  # every State is a dataclass
            name = prefix + each.name
            ours = getattr(reference, each.name)
            theirs = getattr(fast, each.name)
            if type(ours) is not type(theirs):
                raise Mismatch(f"{name} (type)", type(ours).__name__, type(theirs).__name__)
            if isinstance(ours, State):
                self.layout(f"{name}.", ours, theirs, varying)
            elif isinstance(ours, torch.Tensor):
                rows = slice(0) if name in varying else slice(None)
                self._alike(name, ours[rows], theirs[rows])

    def require(self, name: str, holds: bool, reference: Any, fast: Any, node: int | None = None) -> None:
        """A condition that holds exactly."""
        if not holds:
            raise Mismatch(name, reference, fast, node)
        self.tally.fields[name] += 1

    def decided(self, agreed: bool) -> None:
        """One more choice, which was found right; the columns need not have made the same."""
        self.tally.decisions += 1
        if not agreed:
            raise Undecidable

    def _alike(self, name: str, reference: torch.Tensor, fast: torch.Tensor) -> None:
        if reference.shape != fast.shape:
            raise Mismatch(f"{name} (shape)", tuple(reference.shape), tuple(fast.shape))
        if reference.dtype != fast.dtype:
            raise Mismatch(f"{name} (dtype)", str(reference.dtype), str(fast.dtype))

    def _none_wrong(self, name: str, reference: torch.Tensor, fast: torch.Tensor, wrong: torch.Tensor) -> None:
        places = wrong.nonzero()
        if len(places):
            place = tuple(places[0].tolist())
            raise Mismatch(name, reference[place].item(), fast[place].item(), place[0] if place else None)
        self.tally.fields[name] += reference.numel() > 0
