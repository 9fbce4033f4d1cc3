"""No drafter, which is plain decoding: rounds whose tree is its root."""

import torch

from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVPool


class NoDrafter:
    """A drafter with nothing to propose."""

    kv_layout = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        return self._rooted(next_tokens)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        none = torch.empty(batch.size, 0)
        return Candidates(none.long(), none, torch.full((batch.size, 1), -1))

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        return self._rooted(draft_extend_input.bonus_tokens)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH

    def idle(self) -> DraftInput:
        return DraftInput.empty(0, 0, self._dtype)

    def _rooted(self, bonus_tokens: torch.Tensor) -> DraftInput:
        none = torch.empty(len(bonus_tokens), 0)
        return DraftInput(none, none.long(), hidden=none.to(self._dtype), bonus_tokens=bonus_tokens.int())
