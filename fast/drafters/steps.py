"""The protocol of a drafter whose draft phase is a start and steps, each of them capturable in a graph."""

from typing import Any, Protocol

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, State
from specsim.core.pool import KVPool


class StepDrafter(Drafter, Protocol):
    """A drafter that a round calls on static buffers: start once, step S-1 times.

    Draft inputs and buffers are of the drafter's own types. A drafter that runs on the host does all its work in
    `start`, outside graphs.
    """

    def proposer(self, config: SpecConfig) -> "StepDrafter":
        """Make the step drafter of the same weights that proposes under another setting."""
        ...

    def zeros(self, size: int) -> DraftInput:
        """Make the draft input of `size` padded requests, on the host."""
        ...

    def buffers(self, size: int) -> State:
        """Make the buffers of a draft phase of `size` padded requests, on the host, with a field `candidates`.

        They hold what earlier steps would leave for a captured step.
        """
        ...

    def start(self, batch: Batch, draft_input: Any, buffers: Any, pools: KVPool, /) -> None:
        """Start the draft phase with the drafts of the draft input."""
        ...

    def step(self, batch: Batch, buffers: Any, pools: KVPool, /) -> None:
        """Run one draft step, whose number is read on the device."""
        ...

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: Any = None
    ) -> DraftInput:
        """Rewrite the draft KV of the accepted rows, and make the next DraftInput, in `out` where it is given."""
        ...
