"""No drafter, which is plain decoding: rounds whose tree is its root."""

from typing import Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, Candidates, DraftInput
from specsim.core.pool import KVPool


class NoDrafter(Drafter):
    """A drafter with nothing to propose."""

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        none = torch.empty(batch.size, 0)
        return Candidates(none.long(), none, torch.full((batch.size, 1), -1))

    def with_config(self, config: SpecConfig) -> Self:
        return self
