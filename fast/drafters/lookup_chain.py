"""Prompt lookup as a drafter of an engine: chains of n-gram drafts that every graph mode captures."""

from collections.abc import Sequence

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVLayout, KVPool
from specsim.core.token_drafter import NgramConfig
from specsim.fast.drafters.prompt_lookup import Lookup, prompt_lookup
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers


class LookupChainDrafter:
    """A drafter that looks up each request's last tokens on the device, and keeps the root only."""

    kv_layout: KVLayout | None = None
    feature_layers: tuple[int, ...] = ()
    lead: int = 0
    lookahead: int = 0
    num_mask_rows: int = 0
    block_rows: int = 0
    runs_on_host: bool = False

    def __init__(self, ngram: NgramConfig, config: SpecConfig, device: torch.device) -> None:
        self._ngram = ngram
        self._num_steps = config.num_steps
        self._device = device

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        return DraftInput(next_tokens.int())

    def zeros(self, size: int) -> DraftInput:
        return DraftInput(torch.zeros(size, dtype=torch.int32))

    def buffers(self, size: int) -> CandidateBuffers:
        """Make the candidates of padded requests, whose parents and scores no round changes."""
        none = ExplicitCandidates.empty(size, self._num_steps)
        none.parents.copy_(torch.arange(-1, self._num_steps - 1))
        none.scores.fill_(1.0)
        return CandidateBuffers(none)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Look up every request's drafts."""
        made = self.buffers(batch.size).to(self._device)
        self.start(batch, draft_input, made, pools)
        return made.explicit

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Look up every request's drafts, and leave them in the buffers."""
        made = buffers.explicit
        lookup = Lookup(made.tokens, made.num_alive)
        prompt_lookup(
            pools.token_ids, batch.req_pool_indices, batch.seq_lens + 1, self._ngram, self._num_steps, out=lookup
        )

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
        return LookupChainDrafter(self._ngram, config, self._device)
