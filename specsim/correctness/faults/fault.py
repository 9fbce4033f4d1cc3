"""Entries of the fault catalogue, and findings of checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specsim.correctness.faults.injection import Edit


@dataclass(frozen=True, slots=True)
class Trial:
    """A check and its setting."""

    check: str  # its name
    setting: Mapping[str, Any] = field(default_factory=dict)  # values that JSON has


@dataclass(frozen=True, slots=True)
class FaultFinding:
    """One wrong field."""

    field: str  # name of the wrong field
    place: str  # place of the first wrong value
    expected: Any  # right value
    found: Any  # wrong value

    def __str__(self) -> str:
        return f"{self.place}: {self.field} is {self.found}, not {self.expected}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A defect that speculative decoding has had."""

    name: str  # name of the fault
    source: str  # report or fix, owner#number of a public repository, or another account of it
    operation: str  # of the round
    cause: str  # one sentence
    symptom: str  # symptom, in a sentence
    fields: tuple[str, ...]  # a finding of the check has to name one of them
    edits: tuple[Edit, ...]  # the injection; the package itself holds no switch for it
    trial: Trial  # the smallest setting known to show it

    @property
    def code(self) -> str:
        """Owner of the changed code: `fast`, `reference`, or `shared` by both implementations."""
        folders = {edit.module.split(".")[1] for edit in self.edits}
        return next((impl for impl in ("fast", "reference") if impl in folders), "shared")
