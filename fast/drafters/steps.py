"""The protocol of a drafter whose draft phase is a start and steps, each of them capturable in a graph."""

from typing import Any, Protocol

import torch

from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, State
from specsim.core.pool import KVPool


class StepDrafter(Drafter, Protocol):
    """A drafter that a round calls on static buffers: start once, step S-1 times.

    Draft inputs and buffers are of the drafter's own types. A drafter that runs on the host does all its work in
    `start`, outside graphs. What is defined here holds for a drafter that keeps nothing but the root between rounds.
    """

    _device: torch.device

    def zeros(self, size: int) -> Any:
        """Make the draft input of `size` padded requests, on the host."""
        return DraftInput(torch.zeros(size, dtype=torch.int32))

    def idle(self) -> Any:
        """Make the DraftInput of a batch without requests."""
        return self.zeros(0).to(self._device)

    def buffers(self, size: int) -> State:
        """Make the buffers of a draft phase of `size` padded requests, on the host, with a field `candidates`.

        They hold what earlier steps would leave for a captured step.
        """
        ...

    def start(self, batch: Batch, draft_input: Any, buffers: Any, pools: KVPool, /) -> None:
        """Start the draft phase with the drafts of the draft input."""
        ...

    def step(self, batch: Batch, buffers: Any, pools: KVPool, /) -> None:
        """Run one draft step, whose number is read on the device; nothing, where `start` drafts all depths."""

    def propose(self, batch: Batch, draft_input: Any, pools: KVPool) -> Any:
        """Run a draft phase whose start drafts all depths, on new buffers."""
        buffers: Any = self.buffers(batch.size).to(self._device)
        self.start(batch, draft_input, buffers, pools)
        return buffers.candidates

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: Any = None
    ) -> DraftInput:
        """Rewrite the draft KV of the accepted rows, and make the next DraftInput, in `out` where it is given."""
        if out is None:
            return DraftInput(draft_extend_input.bonus_tokens)
        out.bonus_tokens.copy_(draft_extend_input.bonus_tokens)
        return out
