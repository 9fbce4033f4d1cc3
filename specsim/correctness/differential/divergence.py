"""Early ends of a request's comparison: a mismatch, or a choice within rounding error."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Divergence:
    """A difference that rounding does not explain.

    request: its place in the batch, None where a whole state is wrong. node: index of the first wrong entry (a node, a
    candidate, a column, a row of draft-extend; whatever the field counts), None where there is none.
    """

    cell: str
    round: int
    phase: str
    request: int | None
    node: int | None
    field: str
    reference: Any
    fast: Any

    def __str__(self) -> str:
        place = f"round {self.round}, {self.phase}"
        place += "" if self.request is None else f", request {self.request}"
        place += "" if self.node is None else f", entry {self.node}"
        return f"{self.cell}: {place}: {self.field} is {self.fast}, the reference has {self.reference}"


class Mismatch(Exception):
    """The fast column is wrong about a request."""

    def __init__(self, field: str, reference: Any, fast: Any, node: int | None = None) -> None:
        super().__init__(field, reference, fast, node)
        self.field = field
        self.reference = reference
        self.fast = fast
        self.node = node


class Undecidable(Exception):
    """Rounding alone decided where a request went, so the columns may differ from here on; raised after everything
    before it was found equal.
    """
