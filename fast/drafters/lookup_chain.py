"""Prompt lookup as a drafter of an engine: chains of n-gram drafts that every graph mode captures."""

from typing import Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftInput, ExplicitCandidates
from specsim.core.pool import KVPool
from specsim.core.token_drafter import NgramConfig
from specsim.fast.drafters.prompt_lookup import Lookup, prompt_lookup
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers


class LookupChainDrafter(StepDrafter):
    """A drafter that looks up each request's last tokens on the device, and keeps the root only."""

    def __init__(self, ngram: NgramConfig, config: SpecConfig, device: torch.device) -> None:
        self._ngram = ngram
        self._num_steps = config.num_steps
        self._device = device

    def buffers(self, size: int) -> CandidateBuffers:
        """Make the candidates of padded requests, whose parents and scores no round changes."""
        none = ExplicitCandidates.empty(size, self._num_steps)
        none.parents.copy_(torch.arange(-1, self._num_steps - 1))
        none.scores.fill_(1.0)
        return CandidateBuffers(none)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Look up every request's drafts."""
        buffers = self.buffers(batch.size).to(self._device)
        self.start(batch, draft_input, buffers, pools)
        return buffers.explicit

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Look up every request's drafts, and leave them in the buffers."""
        lookup = Lookup(buffers.explicit.tokens, buffers.explicit.num_alive)
        prompt_lookup(
            pools.token_ids, batch.req_pool_indices, batch.seq_lens + 1, self._ngram, self._num_steps, out=lookup
        )

    def with_config(self, config: SpecConfig) -> Self:
        return type(self)(self._ngram, config, self._device)
