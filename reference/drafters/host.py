"""Drafters that see token ids only and run on the host: n-gram, suffix, a user's own."""

from collections.abc import Sequence
from copy import copy

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.proposals import Proposals
from specsim.core.target import Target
from specsim.core.token_drafter import TokenDrafter


class HostDrafter:
    """A token drafter as a drafter of an engine; between rounds it keeps the root only."""

    kv_layout = None
    feature_layers: tuple[int, ...] = ()
    lead = 0
    lookahead = 0
    num_mask_rows = 0
    block_rows = 0
    runs_on_host = True

    def __init__(self, drafter: TokenDrafter, config: SpecConfig, vocab_size: int) -> None:
        self.token_drafter = drafter
        self._proposals = Proposals(drafter, config, vocab_size)

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Forget what was read of these requests before, as another run may use the same ids."""
        self._proposals.forget(batch.request_ids.tolist())
        return DraftInput(next_tokens.int())

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Ask the drafter for every request's candidates."""
        return self._proposals.candidates(batch, pools)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        return DraftInput(draft_extend_input.bonus_tokens)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        self._proposals.finish(request_id, tokens, prompt_len)

    def idle(self) -> DraftInput:
        return DraftInput(torch.empty(0, dtype=torch.int32))

    def proposer(self, config: SpecConfig) -> Drafter:
        proposer = copy(self)
        proposer._proposals = self._proposals.within(config)
        return proposer


def make(drafter: TokenDrafter, target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a user's token drafter that of a reference engine."""
    return HostDrafter(drafter, config, target.config.vocab_size)
