"""Data that every comparison of a phase reads."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.correctness.differential.comparison import Tally, Trio

_HANDED_ON = {"prefill": "draft_input", "verify": "draft_extend_input", "round": "draft_input"}


@dataclass(slots=True)
class Column:
    """One engine with its pools and the state it enters the next phase with. pads: whether it fills batches up."""

    engine: Any
    pools: KVPool
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    pads: bool = False
    state: Any = None

    def take_over(self, other: "Column") -> None:
        """Go on from where another column is: its state and everything its pools hold."""
        self.pools.copy_(other.pools)
        self.state = deepcopy(other.state).to(self.device, self.dtype)

    def advance(self, phase: str, batch: Batch) -> Any:
        """Run a phase (or a whole `round`) and keep what it leaves as the next one's state."""
        output = getattr(self.engine, phase)(batch.to(self.device), self.state, self.pools)
        self.state = getattr(output, _HANDED_ON[phase]) if phase in _HANDED_ON else output
        return output

    def keep(self, requests: Sequence[int]) -> None:
        """Drop the state of every other request."""
        self.state = self.state.filter(torch.tensor(requests, dtype=torch.int64, device=self.device))


@dataclass(frozen=True, slots=True)
class Scene:
    """A phase under comparison.

    pools: after the phase; the fast column's on its device. before: the fast column's before the phase. owned: the
    reference's before the phase, for its tables. draft_ids: i64, the draft id of every target id, -1 for none.
    """

    config: SpecConfig
    batch: Batch
    columns: Trio[Column]
    before: KVPool
    owned: KVPool
    draft_ids: torch.Tensor
    eps: float
    tally: Tally

    @property
    def pools(self) -> Trio[KVPool]:
        return self.columns.map(lambda column: column.pools)

    def place(self, request: int) -> tuple[int, int]:
        """(row of the tables, L) of a request."""
        return self.batch.rows_and_lens[request]
