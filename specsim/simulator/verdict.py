"""Verdicts on a report's figures, and the settings that they need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specsim.simulator.rounded import Rounded

Verdict = Literal["holds", "cannot be true", "follows"]
Verdicts = Iterator[tuple[Verdict, str]]  # each with its reason, with figures
EXACT = 1e-3  # relative error of an identity whose printed places are not known


@dataclass(frozen=True, slots=True)
class Stated:
    """Settings stated by the command or the text of a report."""

    output_tokens: int | None = None  # per request
    num_drafts: int | None = None  # per round


NOTHING_STATED = Stated()


def identity(left: str, value: Rounded, right: str, other: Rounded) -> tuple[Verdict, str]:
    """Compare two figures that have to be equal."""
    is_equal = value.equals(other, EXACT)
    return ("holds" if is_equal else "cannot be true"), f"{left} {value.value:g}, {right} {other.value:g}"
