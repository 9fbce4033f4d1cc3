"""Drafters that see token ids only and run on the host: n-gram, suffix, a user's own."""

from collections.abc import Sequence
from copy import copy

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVLayout, KVPool
from specsim.core.proposals import Proposals
from specsim.core.target import Target
from specsim.core.token_drafter import TokenDrafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.runtime.states import load


class HostDrafter:
    """A token drafter as a drafter of an engine; between rounds it keeps the root only.

    The draft phase is host code between two graphs, which copies the candidates to static buffers.
    """

    kv_layout: KVLayout | None = None
    feature_layers: tuple[int, ...] = ()
    lead: int = 0
    lookahead: int = 0
    num_mask_rows: int = 0
    block_rows: int = 0
    runs_on_host: bool = True

    def __init__(self, drafter: TokenDrafter, config: SpecConfig, vocab_size: int, device: torch.device) -> None:
        self._proposals = Proposals(drafter, config, vocab_size)
        self._most = config.num_candidates
        self._device = device

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Forget what was read of these requests before, as another run may use the same ids."""
        self._proposals.forget(batch.request_ids.tolist())
        return DraftInput(next_tokens.int())

    def zeros(self, size: int) -> DraftInput:
        return DraftInput(torch.zeros(size, dtype=torch.int32))

    def buffers(self, size: int) -> CandidateBuffers:
        return CandidateBuffers(ExplicitCandidates.empty(size, self._most))

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Ask the drafter for every request's candidates."""
        return self._proposals.candidates(batch, pools).to(self._device)

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Ask the drafter for every request's candidates, and copy them to the buffers."""
        load(buffers.candidates, self._proposals.candidates(batch, pools))

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
        self._proposals.finish(request_id, tokens, prompt_len)

    def idle(self) -> DraftInput:
        return self.zeros(0).to(self._device)

    def proposer(self, config: SpecConfig) -> StepDrafter:
        proposer = copy(self)
        proposer._proposals = self._proposals.within(config)
        proposer._most = config.num_candidates
        return proposer


def make(drafter: TokenDrafter, target: Target, config: SpecConfig, on: Placement) -> StepDrafter:
    """Make a user's token drafter that of a fast engine."""
    return HostDrafter(drafter, config, target.config.vocab_size, on.device)
