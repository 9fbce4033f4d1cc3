"""No drafter: rounds whose tree is its root, which is plain decoding."""

import torch

from specsim.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.pool import KVPool


class NoDrafter:
    """The drafter protocol with nothing to propose."""

    kv_layout = None
    feature_layers = ()

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        return _rooted(next_tokens)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        none = torch.empty(batch.size, 0)
        return Candidates(none.long(), none, torch.full((batch.size, 1), -1))

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        return _rooted(draft_extend_input.bonus_tokens)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH

    def idle(self) -> DraftInput:
        return DraftInput.empty(0, 0)


def _rooted(bonus_tokens: torch.Tensor) -> DraftInput:
    none = torch.empty(len(bonus_tokens), 0)
    return DraftInput(topk_p=none, topk_index=none.long(), hidden=none, bonus_tokens=bonus_tokens.int())
