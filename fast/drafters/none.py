"""No drafter: rounds whose tree is its root, which is plain decoding."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.fast.drafting import Lanes


class NoDrafter:
    """The drafter protocol with nothing to propose."""

    kv_layout = None
    feature_layers = ()
    hidden_size = 0

    def __init__(self, config: SpecConfig, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        none = torch.empty(batch.size, 0, device=self._device)
        return DraftInput(none, none.long(), none.to(self._dtype), next_tokens.int())

    def start(self, batch: Batch, draft_input: DraftInput, lanes: Lanes, pools: KVPool) -> None:
        pass

    def step(self, batch: Batch, lanes: Lanes, pools: KVPool) -> None:
        pass

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, out: DraftInput) -> DraftInput:
        out.bonus_tokens.copy_(draft_extend_input.bonus_tokens)
        return out

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH

    def idle(self) -> DraftInput:
        return DraftInput.empty(0, 0, self._dtype).to(self._device)
