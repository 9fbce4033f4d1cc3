"""No drafter, which is plain decoding: rounds whose tree is its root."""

from typing import Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Candidates, DraftInput
from specsim.core.pool import KVPool
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers


class NoDrafter(StepDrafter):
    """A drafter with nothing to propose."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffers(self, size: int) -> CandidateBuffers:
        none = torch.empty(size, 0)
        return CandidateBuffers(Candidates(none.long(), none, torch.full((size, 1), -1)))

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        return self.buffers(batch.size).to(self._device).candidates  # pyright: ignore[reportReturnType]

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        pass

    def with_config(self, config: SpecConfig) -> Self:
        return self
