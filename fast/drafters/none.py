"""No drafter, which is plain decoding: rounds whose tree is its root."""

import torch

from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVLayout, KVPool
from specsim.fast.lanes import Lanes


class NoDrafter:
    """A drafter with nothing to propose."""

    kv_layout: KVLayout | None = None
    feature_layers: tuple[int, ...] = ()
    hidden_size: int = 0

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        return self._rooted(next_tokens)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        none = torch.empty(batch.size, 0, device=self._device)
        return Candidates(none.long(), none, torch.full((batch.size, 1), -1, device=self._device))

    def start(self, batch: Batch, draft_input: DraftInput, lanes: Lanes, pools: KVPool) -> None:
        pass

    def step(self, batch: Batch, lanes: Lanes, pools: KVPool) -> None:
        pass

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: DraftInput | None = None
    ) -> DraftInput:
        if out is None:
            return self._rooted(draft_extend_input.bonus_tokens)
        out.bonus_tokens.copy_(draft_extend_input.bonus_tokens)
        return out

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH

    def idle(self) -> DraftInput:
        return DraftInput.empty(0, 0, self._dtype).to(self._device)

    def _rooted(self, bonus_tokens: torch.Tensor) -> DraftInput:
        none = torch.empty(len(bonus_tokens), 0, device=self._device)
        return DraftInput(none, none.long(), none.to(self._dtype), bonus_tokens.int())
