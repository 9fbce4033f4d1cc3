"""Results of a grid's cells, and their printed form."""

import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from specsim.core.errors import require, round_name
from specsim.core.json_schema import read_dataclass, schema_name

if TYPE_CHECKING:
    from rich.console import Console

IDENTITY = ("grid", "fingerprint", "num_cells", "impl", "device", "dtype", "versions")  # kept by a resumed run
PHASES = ("prefill", "draft", "verify", "draft_extend")
MOST_WITHIN_ROUNDING = 0.001
FEW = 2  # decisions in float32; a short run may have this many whatever its share
LEAST_COMPARED = 0.25  # of the requests of each phase in bfloat16, where about half of them diverge by rounding


@dataclass(frozen=True, slots=True)
class Divergence:
    """A difference that rounding does not explain."""

    cell: str  # name of the cell
    round: int  # number of the round, from 1; 0 is the prefill
    phase: str  # prefill, draft, verify or draft_extend
    request: int | None  # place in the batch, None where a whole state is wrong
    node: int | None  # first wrong entry of the field (a node, candidate, column or row), None for none
    field: str  # name of the wrong field
    reference: Any  # value of the reference
    fast: Any  # value of the implementation that was compared

    @property
    def location(self) -> str:
        """Round, counted from 0, and phase, and where they are known, request and entry."""
        location = f"{round_name(self.round)}, {self.phase}" if self.round else self.phase
        location += "" if self.request is None else f", request {self.request}"
        return location + ("" if self.node is None else f", entry {self.node}")

    def __str__(self) -> str:
        return f"{self.cell}: {self.location}: {self.field} is {self.fast}, the reference has {self.reference}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """Results of one cell."""

    id: str  # name of the cell
    mismatches: int = 0  # wrong requests, summed over phases
    within_rounding_error: int = 0  # decisions that rounding may turn
    decisions: int = 0  # decisions that were compared
    max_logprob_error: float = 0.0  # largest error of a log-probability against float64
    compared: dict[str, int] = field(default_factory=dict)  # requests, by phase
    not_compared: dict[str, int] = field(default_factory=dict)  # requests, by phase
    coverage: dict[str, int] = field(default_factory=dict)  # occurrences by name
    fields: dict[str, int] = field(default_factory=dict)  # comparisons of each field
    seconds: float = 0.0  # wall-clock time in seconds
    first_divergence: Divergence | None = None

    @property
    def is_empty(self) -> bool:
        """Whether some phase was never fully compared: the cell then proves nothing."""
        return not self.mismatches and any(self.compared.get(phase, 0) == 0 for phase in PHASES)

    @classmethod
    def from_json(cls, value: Any, name: str = "result") -> "CellResult":
        """Read a cell that `to_json` of a grid wrote; InputError, which begins with the name, for anything else."""
        if isinstance(value, dict) and value.get("max_logprob_error", 0.0) is None:
            value = value | {"max_logprob_error": sys.float_info.max}  # of an infinite one
        cell = read_dataclass(cls, value, name)
        first = cell.first_divergence
        is_told = (first is None) == (cell.mismatches == 0) and (first is None or first.cell == cell.id)
        require(is_told, f"{name}.first_divergence", first, "the first of the cell's mismatches, null without any")
        return cell


@dataclass(frozen=True, slots=True)
class GridResult:
    """Results of a grid's cells, or of the part that has run."""

    grid: str  # name of the grid, or one cell
    fingerprint: str  # digest of all cells of the grid; a run with another one cannot be resumed
    num_cells: int  # of the whole grid
    device: str  # device of the implementation: cpu or cuda
    dtype: str  # data type of weights and KV
    impl: str  # implementation that was compared with the reference
    versions: dict[str, str]
    date: str  # date and time of the run in UTC, to the second
    command: str
    required: tuple[str, ...]  # coverage that the whole grid has to reach
    cells: tuple[CellResult, ...]

    def total(self, name: str) -> int:
        return sum(getattr(cell, name) for cell in self.cells)

    def sum(self, name: str) -> dict[str, int]:
        counter = Counter()
        for cell in self.cells:
            counter.update(getattr(cell, name))
        return dict(counter)

    @property
    def coverage(self) -> dict[str, int]:
        """Occurrences of each case that the grid must cover."""
        rounded = {"within rounding error": self.total("within_rounding_error")}
        return {**dict.fromkeys(self.required, 0), **self.sum("coverage"), **rounded}

    @property
    def first_divergence(self) -> Divergence | None:
        return next((cell.first_divergence for cell in self.cells if cell.first_divergence), None)

    @property
    def within_rounding_share(self) -> float:
        return self.total("within_rounding_error") / max(1, self.total("decisions"))

    @property
    def incomplete_cells(self) -> list[str]:
        """List the cells in which rounding left some phase never fully compared; bfloat16 has such cells."""
        return [cell.id for cell in self.cells if cell.is_empty]

    def compared_share(self, phase: str) -> float:
        """Share of a phase's requests that were fully compared; 0 where there were none."""
        compared, not_compared = (self.sum(name).get(phase, 0) for name in ("compared", "not_compared"))
        return compared / max(1, compared + not_compared)

    @property
    def is_complete(self) -> bool:
        return len(self.cells) == self.num_cells

    def failures(self) -> list[str]:
        """List the reasons why equality is not shown; only a whole grid has to reach its coverage."""
        reasons = []
        if mismatches := self.total("mismatches"):
            reasons.append(f"{mismatches} mismatches")
        if self.incomplete_cells and self.dtype == "float32":
            reasons.append(f"some phase was never fully compared in {', '.join(self.incomplete_cells)}")
        allowed = max(FEW, MOST_WITHIN_ROUNDING * self.total("decisions"))
        if self.dtype == "float32" and self.total("within_rounding_error") > allowed:
            share = f"{self.within_rounding_share:.2%} of the decisions are within rounding error"
            reasons.append(f"{share}, more than {MOST_WITHIN_ROUNDING:.1%}")
        coarse = self.dtype != "float32" and self.is_complete
        shares = {phase: self.compared_share(phase) for phase in PHASES} if coarse else {}
        if few := [f"{share:.0%} of {phase}" for phase, share in shares.items() if share < LEAST_COMPARED]:
            reasons.append(f"fully compared were only {', '.join(few)}, less than {LEAST_COMPARED:.0%}")
        missing = [name for name in self.required if not self.coverage[name]] if self.is_complete else []
        if missing:
            reasons.append(f"not covered: {', '.join(missing)}")
        if not reasons and len(self.incomplete_cells) == len(self.cells):
            reasons.append("no cell was fully compared")
        return reasons

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "schema": schema_name("diff"),
            **{name: getattr(self, name) for name in (*IDENTITY, "date", "command", "incomplete_cells")},
            **{name: self.total(name) for name in ("decisions", "within_rounding_error", "mismatches", "seconds")},
            **{name: self.sum(name) for name in ("compared", "not_compared", "fields")},
            "cells": len(self.cells),
            "coverage": self.coverage,
            "max_logprob_error": max((cell.max_logprob_error for cell in self.cells), default=0.0),
            "failures": self.failures(),
            "first_divergence": asdict(self.first_divergence) if self.first_divergence else None,
            "results": [asdict(cell) for cell in self.cells],
        }


def show(result: GridResult, console: "Console") -> None:
    """Print a short table, then the first divergence and the verdict in words."""
    from specsim.core.display import figure, paragraph, print_table

    coverage = ", ".join(f"{name} {figure(count, 0)}" for name, count in result.coverage.items())
    compared, not_compared = (sum(result.sum(name).values()) for name in ("compared", "not_compared"))
    share = f"{result.within_rounding_share:.3%} of the decisions"
    error = max((cell.max_logprob_error for cell in result.cells), default=0.0)
    rows = [
        ("implementation", f"{result.impl} on {result.device} in {result.dtype}, against the reference"),
        ("cells", f"{len(result.cells)} of {result.num_cells}"),
        ("cells with a phase never fully compared", figure(len(result.incomplete_cells), 0)),
        ("requests a phase", f"{figure(compared, 0)} compared, {figure(not_compared, 0)} not compared"),
        ("decisions", figure(result.total("decisions"), 0)),
        ("within rounding error", f"{figure(result.total('within_rounding_error'), 0)}, {share}"),
        ("mismatches", figure(result.total("mismatches"), 0)),
        ("largest logprob error", f"{error:.1e}"),
        ("seconds", figure(result.total("seconds"))),
    ]
    print_table(console, (), rows)
    console.print()
    paragraph(console, f"Coverage: {coverage}.")
    if first := result.first_divergence:
        paragraph(console, f"First divergence: {first}.")
    reasons = result.failures()
    equal = "The implementations are equal." if result.is_complete else "The implementations are equal in these cells."
    paragraph(console, f"Not shown to be equal: {'; '.join(reasons)}." if reasons else equal)
