"""Check of an answer, which is right if it gives the solution's values, and display of the solution."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from inspect import signature
from itertools import islice
from numbers import Number
from typing import Any, Literal

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, text_of
from specsim.course.exercise import Exercise, call, source
from specsim.course.exercises import exercises

_TOLERANCE = 1e-6  # of floats, as a share of the value
_MOST_SHOWN = 160  # characters of a value
_COLORS = {"right": "#00664B", "not right yet": "#A35F00", "not solved yet": "#0072B2"}
Status = Literal["right", "not right yet", "not solved yet"]


def names() -> list[str]:
    """List the names of all exercises, in the order of the course."""
    return list(exercises())


@check_arguments
def exercise(name: str) -> Exercise:
    """Find an exercise; InputError for a name that none has."""
    by_name = exercises()
    require(name in by_name, "exercise", name, f"one of {', '.join(by_name)}")
    return by_name[name]


@dataclass(frozen=True, slots=True, repr=False)
class CheckResult:
    """The result of a check, shown in words."""

    exercise: str
    status: Status
    reasons: tuple[str, ...]  # sentences

    @property
    def is_right(self) -> bool:
        """Whether the answer is accepted."""
        return self.status == "right"

    def __repr__(self) -> str:
        return "\n  ".join([f"Exercise {self.exercise}: {self.status}.", *self.reasons])

    def _repr_html_(self) -> str:
        color = _COLORS[self.status]
        style = f"border-left:4px solid {color};padding:.3em .8em;margin:.3em 0"
        lines = "".join(f"<div>{escape(reason)}</div>" for reason in self.reasons)
        return f"<div style='{style}'><b>Exercise {escape(self.exercise)}: {self.status}.</b>{lines}</div>"


@dataclass(frozen=True, slots=True, repr=False)
class Solution:
    """A solution, shown as source with its explanation."""

    exercise: str
    source: str
    explanation: str

    def __repr__(self) -> str:
        return f"{self.source}\n{self.explanation}"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.source)}</pre><p>{escape(self.explanation)}</p>"


def solution(name: str) -> Solution:
    """Show the solution of an exercise; InputError for the name of no exercise."""
    solved = exercise(name)
    return Solution(name, source(solved), solved.explanation)


def check(name: str, answer: Any) -> CheckResult:
    """Check the answer to an exercise, a function; whatever the answer does, the result is in words.

    InputError for the name of no exercise.
    """
    checked = exercise(name)
    if answer is None or answer is ...:
        return _unsolved(checked)
    if not callable(answer):
        return CheckResult(name, "not right yet", (f"The answer is {formatted(answer)}; give the function itself.",))
    try:
        values = checked.observed(answer)
    except NotImplementedError:
        return _unsolved(checked)
    expected = checked.observed(checked.solution)
    if same(values, expected):
        return CheckResult(name, "right", (checked.explanation,))
    matches = (row.reason for row in checked.mistakes if _is_like(values, checked.observed(row.answer), expected))
    return CheckResult(name, "not right yet", (_first_difference(checked, values, expected), *islice(matches, 1)))


def _is_like(values: list[Any], mistaken: list[Any], expected: list[Any]) -> bool:
    """Find out whether an answer is wrong like a mistake, apart from cases on which only the answer raises."""
    if same(values, mistaken):
        return True
    cases = [case for case in zip(values, mistaken, expected, strict=True) if not isinstance(case[0], BaseException)]
    return all(same(one, other) for one, other, _ in cases) and any(not same(one, right) for one, _, right in cases)


def _unsolved(checked: Exercise) -> CheckResult:
    text = f"Write the body of {checked.solution.__name__}, run its cell, then run this one again."
    return CheckResult(checked.name, "not solved yet", (text,))


def _first_difference(checked: Exercise, values: list[Any], expected: list[Any]) -> str:
    """Describe the first case on which an answer is observed to be wrong."""
    rows = zip(checked.cases, values, expected, strict=True)
    case, one, other = next(row for row in rows if not same(*row[1:]))
    arguments = list(map(formatted, case))
    subject = f"{checked.solution.__name__}({', '.join(arguments)})"
    if checked.observe is not call:
        names = list(signature(checked.observe).parameters)[1:]
        subject = f"With {', '.join(map(' '.join, zip(names, arguments, strict=False)))}: the answer"
    if isinstance(one, BaseException):
        return f"{subject} raises {type(one).__name__}: {one}"[: 2 * _MOST_SHOWN]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        parts = [f"{name} {formatted(one.get(name))} instead of {formatted(other[name])}" for name in other
                 if not same(one.get(name), other[name])]  # fmt: skip
        return f"{subject} has {', '.join(parts)}."
    return f"{subject} gives {formatted(one)}; it should give {formatted(other)}."


def same(one: Any, other: Any) -> bool:
    """Compare two observations: exact but for floats, lists like tuples, tensors like lists."""
    if isinstance(one, BaseException) or isinstance(other, BaseException):
        return type(one) is type(other) and str(one) == str(other)
    one, other = (value.tolist() if hasattr(value, "tolist") else value for value in (one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        if isinstance(one, Number) and isinstance(other, Number) and float in (type(one), type(other)):
            return math.isclose(float(one), float(other), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)  # type: ignore[arg-type]
        return bool(one == other)
    except Exception:
        return False


def formatted(value: Any) -> str:
    """Format a value in few characters: fractions as 5/8, floats with 4 digits."""
    return text_of(_formatted, value)


def _formatted(value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        body = ", ".join(map(formatted, value))
        text = f"[{body}]" if isinstance(value, list) else f"({body})"
    elif callable(value):
        text = getattr(value, "__name__", type(value).__name__)
    else:
        text = str(value) if isinstance(value, Number) else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
