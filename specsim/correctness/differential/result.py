"""Results of a grid's cells."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from specsim.correctness.differential.divergence import Divergence

PHASES = ("prefill", "draft", "verify", "draft_extend")
MOST_UNDECIDABLE = 0.001
FEW = 2  # of the decisions in float32; and how many a short run may have whatever its share
LEAST_COMPARED = 0.25  # of the requests of each phase in bfloat16, whose rounding parts about half of them


@dataclass(frozen=True, slots=True)
class CellResult:
    """mismatches: requests a phase that differ. compared, left_out: requests, by phase. fields: how often each field
    was compared.
    """

    id: str
    mismatches: int = 0
    undecidable: int = 0
    decisions: int = 0
    max_logprob_error: float = 0.0
    compared: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    exercised: dict[str, int] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    first_divergence: Divergence | None = None

    @property
    def is_empty(self) -> bool:
        """Whether some phase was never compared in full: the cell then shows nothing."""
        return not self.mismatches and any(self.compared.get(phase, 0) == 0 for phase in PHASES)

    @classmethod
    def from_json(cls, value: dict) -> "CellResult":
        first = value["first_divergence"]
        return cls(**{**value, "first_divergence": first and Divergence(**first)})


@dataclass(frozen=True, slots=True)
class GridResult:
    """The cells of a grid that have been run; num_cells: how many it has. required: what they have to exercise."""

    grid: str
    fingerprint: str
    num_cells: int
    device: str
    dtype: str
    impl: str
    versions: dict[str, str]
    date: str
    command: str
    required: tuple[str, ...]
    cells: tuple[CellResult, ...]

    def total(self, name: str) -> int:
        return sum(getattr(cell, name) for cell in self.cells)

    def sum(self, name: str) -> dict[str, int]:
        counter = Counter()
        for cell in self.cells:
            counter.update(getattr(cell, name))
        return dict(counter)

    @property
    def exercised(self) -> dict[str, int]:
        return {**dict.fromkeys(self.required, 0), **self.sum("exercised"), "undecidable": self.total("undecidable")}

    @property
    def first_divergence(self) -> Divergence | None:
        return next((cell.first_divergence for cell in self.cells if cell.first_divergence), None)

    @property
    def undecidable_share(self) -> float:
        return self.total("undecidable") / max(1, self.total("decisions"))

    @property
    def parted(self) -> list[str]:
        """Cells in which undecidable choices left some phase never compared to its end; bfloat16 has such cells."""
        return [cell.id for cell in self.cells if cell.is_empty]

    def compared_share(self, phase: str) -> float:
        """Share of a phase's requests that were compared to the end; 0 where there were none."""
        compared, left_out = (self.sum(name).get(phase, 0) for name in ("compared", "left_out"))
        return compared / max(1, compared + left_out)

    @property
    def is_complete(self) -> bool:
        return len(self.cells) == self.num_cells

    def failures(self) -> list[str]:
        """Why the columns are not shown to be equal, in words; none where they are.

        A shard cannot be asked to exercise everything: that is asked of the whole grid.
        """
        reasons = []
        if mismatches := self.total("mismatches"):
            reasons.append(f"{mismatches} mismatches")
        if self.parted and self.dtype == "float32":
            reasons.append(f"some phase was never compared to the end in {', '.join(self.parted)}")
        allowed = max(FEW, MOST_UNDECIDABLE * self.total("decisions"))
        if self.dtype == "float32" and self.total("undecidable") > allowed:
            share = f"{self.undecidable_share:.2%} of the decisions are undecidable"
            reasons.append(f"{share}, more than {MOST_UNDECIDABLE:.1%}")
        coarse = self.dtype != "float32" and self.is_complete
        shares = {phase: self.compared_share(phase) for phase in PHASES} if coarse else {}
        if few := [f"{share:.0%} of {phase}" for phase, share in shares.items() if share < LEAST_COMPARED]:
            reasons.append(f"compared to the end was only {', '.join(few)}, less than {LEAST_COMPARED:.0%}")
        missing = [name for name in self.required if not self.exercised[name]] if self.is_complete else []
        if missing:
            reasons.append(f"never exercised: {', '.join(missing)}")
        return reasons

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        errors = [cell.max_logprob_error for cell in self.cells]
        return {
            "grid": self.grid,
            "fingerprint": self.fingerprint,
            "num_cells": self.num_cells,
            "cells": len(self.cells),
            "impl": self.impl,
            "device": self.device,
            "dtype": self.dtype,
            "versions": self.versions,
            "date": self.date,
            "command": self.command,
            "decisions": self.total("decisions"),
            "undecidable": self.total("undecidable"),
            "mismatches": self.total("mismatches"),
            "compared": self.sum("compared"),
            "left_out": self.sum("left_out"),
            "exercised": self.exercised,
            "fields": self.sum("fields"),
            "max_logprob_error": max(errors, default=0.0),
            "parted": self.parted,
            "seconds": sum(cell.seconds for cell in self.cells),
            "failures": self.failures(),
            "first_divergence": asdict(self.first_divergence) if self.first_divergence else None,
            "results": [asdict(cell) for cell in self.cells],
        }
