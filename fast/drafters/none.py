"""No drafter, which is plain decoding: rounds whose tree is its root."""

from collections.abc import Sequence

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVLayout, KVPool
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers


class NoDrafter:
    """A drafter with nothing to propose."""

    kv_layout: KVLayout | None = None
    feature_layers: tuple[int, ...] = ()
    lead: int = 0
    lookahead: int = 0
    num_mask_rows: int = 0
    block_rows: int = 0
    runs_on_host: bool = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        return DraftInput(next_tokens.int())

    def zeros(self, size: int) -> DraftInput:
        return DraftInput(torch.zeros(size, dtype=torch.int32))

    def buffers(self, size: int) -> CandidateBuffers:
        none = torch.empty(size, 0)
        return CandidateBuffers(Candidates(none.long(), none, torch.full((size, 1), -1)))

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        return self.buffers(batch.size).to(self._device).candidates  # pyright: ignore[reportReturnType]

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        pass

    def step(self, batch: Batch, buffers: CandidateBuffers, pools: KVPool) -> None:
        pass

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: DraftInput | None = None
    ) -> DraftInput:
        if out is None:
            return DraftInput(draft_extend_input.bonus_tokens)
        out.bonus_tokens.copy_(draft_extend_input.bonus_tokens)
        return out

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        pass

    def idle(self) -> DraftInput:
        return self.zeros(0).to(self._device)

    def proposer(self, config: SpecConfig) -> StepDrafter:
        return self
