"""What a fault of the catalogue is, and what a judge finds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specsim.correctness.faults.injection import Edit


@dataclass(frozen=True, slots=True)
class Trial:
    """A judge by name, and the setting that it judges, of values that JSON has."""

    judge: str
    setting: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One field that is not what it should be. place: where it was seen first. expected, found: both values there."""

    field: str
    place: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.place}: {self.field} is {self.found}, not {self.expected}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A defect that speculative decoding has had.

    source: where it was reported or repaired, owner#number of a public repository, or what is known of it otherwise.
    operation: of the round. cause, symptom: in a sentence. fields: the names, any of which a judge's finding has to
    have. edits: how it is planted; not an instruction that could be left in by mistake. trial: the smallest setting
    that is known to show it.
    """

    name: str
    source: str
    operation: str
    cause: str
    symptom: str
    fields: tuple[str, ...]
    edits: tuple[Edit, ...]
    trial: Trial

    @property
    def code(self) -> str:
        """Whose code is changed: `fast`, `reference`, or `shared` by both columns."""
        columns = {edit.module.split(".")[1] for edit in self.edits}
        return next((column for column in ("fast", "reference") if column in columns), "shared")
