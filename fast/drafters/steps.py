"""The protocol of a drafter whose draft phase is a start and steps, each of them capturable in a graph."""

from typing import Protocol

from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, DraftExtendInput, DraftInput
from specsim.core.pool import KVPool
from specsim.fast.lanes import Lanes


class StepDrafter(Drafter, Protocol):
    """A drafter that a round calls on static buffers: start once, step S-1 times."""

    hidden_size: int  # width of DraftInput.hidden, 0 where it has none

    def start(self, batch: Batch, draft_input: DraftInput, lanes: Lanes, pools: KVPool) -> None:
        """Start the lanes with the root's children."""
        ...

    def step(self, batch: Batch, lanes: Lanes, pools: KVPool) -> None:
        """Run one draft step of all lanes, whose number is read on the device."""
        ...

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: DraftInput | None = None
    ) -> DraftInput:
        """Rewrite the draft KV of the accepted rows, and make the next DraftInput, in `out` where it is given."""
        ...
