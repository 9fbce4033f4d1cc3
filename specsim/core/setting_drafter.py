"""A drafter whose rounds have another setting than its states, which both engines use to switch settings."""

from collections.abc import Sequence
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVPool


class SettingDrafter:
    """Two drafters of the same weights: `carrier` makes the states, `proposer` drafts from what it needs of them.

    So the draft KV and the state of a request are the same after a round of any setting, one without drafts included.
    """

    def __init__(self, carrier: Drafter, proposer: Drafter, config: SpecConfig) -> None:
        self._carrier: Any = carrier
        self._proposer: Any = proposer
        self._config = config
        self.kv_layout = carrier.kv_layout
        self.feature_layers = carrier.feature_layers
        self.lead = carrier.lead
        self.lookahead = carrier.lookahead
        self.num_mask_rows = carrier.num_mask_rows
        self.block_rows = proposer.block_rows
        self.runs_on_host = proposer.runs_on_host

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Make the carrier's state after a prefill."""
        return self._carrier.seed(batch, prefill, next_tokens, features_RF, pools)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates | ExplicitCandidates:
        """Propose the candidates of this setting."""
        return self._proposer.propose(batch, self._narrowed(draft_input), pools)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Make the carrier's state after verify."""
        return self._carrier.extend(batch, draft_extend_input, pools)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Tell the carrier, which may share what it learns with the proposers of all settings."""
        self._carrier.finish(request_id, tokens, prompt_len)

    def idle(self) -> DraftInput:
        return self._carrier.idle()

    def under(self, config: SpecConfig) -> Drafter:
        return self._carrier.under(config)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._carrier.logits(hidden_RH)

    def _narrowed(self, draft_input: DraftInput) -> DraftInput:
        return draft_input.narrowed(self._config.topk, self._config.num_steps)
