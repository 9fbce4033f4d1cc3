"""Check of an answer: the same observations as the solution's, else the first difference and the mistake behind it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from inspect import signature
from numbers import Number
from typing import Any, Literal

from specsim.course.exercise import Answer, Exercise
from specsim.course.exercises import exercise

_TOLERANCE = 1e-6  # of floats, as a share of the value
_MOST_SHOWN = 160  # characters of a value
_COLORS = {"right": "#00664B", "not right yet": "#A35F00", "not solved yet": "#0072B2"}
Status = Literal["right", "not right yet", "not solved yet"]


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


def check(name: str, answer: Any) -> CheckResult:
    """Check the answer to an exercise, a function; whatever the answer does, the result is in words.

    InputError for the name of no exercise.
    """
    chosen = exercise(name)
    if answer is None or answer is ...:
        return _unsolved(chosen)
    if not callable(answer):
        return CheckResult(name, "not right yet", (f"The answer is {shown(answer)}; give the function itself.",))
    try:
        found = chosen.observed(answer)
    except NotImplementedError:
        return _unsolved(chosen)
    expected = chosen.observed(chosen.solution)
    if same(found, expected):
        return CheckResult(name, "right", (chosen.explanation,))
    reasons = [_first_difference(chosen, answer, found, expected)]
    reasons += [each.reason for each in chosen.mistakes if _is_like(found, chosen.observed(each.answer), expected)][:1]
    return CheckResult(name, "not right yet", tuple(reasons))


def _is_like(found: list[Any], mistaken: list[Any], expected: list[Any]) -> bool:
    """Find out whether an answer is wrong like a mistake, apart from cases on which only the answer raises."""
    if same(found, mistaken):
        return True
    cases = [case for case in zip(found, mistaken, expected, strict=True) if not isinstance(case[0], BaseException)]
    return all(same(one, other) for one, other, _ in cases) and any(not same(one, right) for one, _, right in cases)


def _unsolved(chosen: Exercise) -> CheckResult:
    text = f"Write the body of {chosen.solution.__name__}, run its cell, then run this one again."
    return CheckResult(chosen.name, "not solved yet", (text,))


def _first_difference(chosen: Exercise, answer: Answer, found: list[Any], expected: list[Any]) -> str:
    """Describe the first case on which an answer is observed to be wrong."""
    place = next(at for at, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair))
    one, other = found[place], expected[place]
    arguments = ", ".join(map(shown, chosen.cases[place]))
    given = f"{chosen.solution.__name__}({arguments})" if arguments else f"{chosen.solution.__name__}()"
    if chosen.observe.__name__ != "call":
        names = list(signature(chosen.observe).parameters)[1:]
        parts = zip(names, map(shown, chosen.cases[place]), strict=False)
        given = f"With {', '.join(f'{name} {value}' for name, value in parts)}: the answer"
    if isinstance(one, BaseException):
        return f"{given} raises {type(one).__name__}: {one}"[: 2 * _MOST_SHOWN]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        parts = [f"{name} {shown(one.get(name))} instead of {shown(other[name])}" for name in other
                 if not same(one.get(name), other[name])]  # fmt: skip
        return f"{given} has {', '.join(parts)}."
    return f"{given} gives {shown(one)}; it should give {shown(other)}."


def same(one: Any, other: Any) -> bool:
    """Compare two observations: exact but for floats, lists like tuples, tensors like lists."""
    if isinstance(one, BaseException) or isinstance(other, BaseException):
        return type(one) is type(other) and str(one) == str(other)
    one, other = (each.tolist() if hasattr(each, "tolist") else each for each in (one, other))
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


def shown(value: Any) -> str:
    """Format a value in few characters: fractions as 5/8, floats with 4 digits."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        body = ", ".join(map(shown, value))
        text = f"[{body}]" if isinstance(value, list) else f"({body})"
    elif callable(value):
        text = getattr(value, "__name__", type(value).__name__)
    else:
        text = str(value) if isinstance(value, Number) else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
