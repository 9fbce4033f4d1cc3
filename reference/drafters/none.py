"""No drafter, which is plain decoding: rounds whose tree is its root."""

from collections.abc import Sequence

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVPool


class NoDrafter:
    """A drafter with nothing to propose."""

    kv_layout = None
    feature_layers: tuple[int, ...] = ()
    lead = 0
    lookahead = 0
    num_mask_rows = 0
    block_rows = 0
    runs_on_host = False

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        return DraftInput(next_tokens.int())

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        none = torch.empty(batch.size, 0)
        return Candidates(none.long(), none, torch.full((batch.size, 1), -1))

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        return DraftInput(draft_extend_input.bonus_tokens)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        pass

    def idle(self) -> DraftInput:
        return DraftInput(torch.empty(0, dtype=torch.int32))

    def proposer(self, config: SpecConfig) -> Drafter:
        return self
