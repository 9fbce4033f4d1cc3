"""Drafters whose states hold finished drafts: all lanes of a depth have the same children."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Generic, Self, TypeVar

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, Candidates, DraftExtendInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.product import ProductInput
from specsim.reference.drafting import RowDrafts, expand, lanes_of

AnyDrafts = TypeVar("AnyDrafts", bound=ProductInput)


class ProductDrafter(Drafter, Generic[AnyDrafts]):
    """A drafter that makes all drafts of a round in prefill or draft-extend, into a state of type `state`."""

    def __init__(self, state: type[AnyDrafts], config: SpecConfig) -> None:
        self._state = state
        self._config = config

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> AnyDrafts:
        """Run over a prefill, which drafts the first round's tree."""
        features = list(features_RF.split(prefill.row_starts.diff().tolist()))
        return self._draft(batch, prefill.start_lens, features, next_tokens.int(), pools)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AnyDrafts:
        """Run over the accepted rows, which drafts the next round's tree."""
        extend = draft_extend_input
        counts = extend.num_accepted_tokens.tolist()
        rows = extend.hidden.split(extend.row_starts.diff().tolist())
        features = [features[:count] for features, count in zip(rows, counts, strict=True)]
        return self._draft(batch, extend.seq_lens, features, extend.bonus_tokens, pools)

    def _draft(
        self, batch: Batch, start_lens: torch.Tensor, features: list[torch.Tensor], bonus: torch.Tensor, pools: KVPool
    ) -> AnyDrafts:
        """Draft from each request's rows, from start_lens on."""
        raise NotImplementedError

    def _finished(self, bonus: torch.Tensor, hidden_BSH: torch.Tensor, drafts: Sequence[RowDrafts]) -> AnyDrafts:
        """Join the drafts of every depth."""
        draft_prob = [depth_drafts.draft_prob for depth_drafts in drafts if depth_drafts.draft_prob is not None]
        return self._state(
            bonus_tokens=bonus,
            topk_scores=torch.stack([depth_drafts.topk_scores for depth_drafts in drafts], 1),
            topk_index=torch.stack([depth_drafts.topk_index for depth_drafts in drafts], 1),
            hidden=hidden_BSH,
            draft_prob=torch.stack(draft_prob, 1) if draft_prob else None,
        )

    def propose(self, batch: Batch, draft_input: AnyDrafts, pools: KVPool) -> Candidates:
        """Lay the drafts out as candidates, without a forward."""
        return product(draft_input, self._config)

    def with_config(self, config: SpecConfig) -> Self:
        drafter = copy(self)
        drafter._config = config
        return drafter


def product(draft_input: ProductInput, config: SpecConfig) -> Candidates:
    """Lay the drafts out as candidates, without a forward: K lanes, each with the children of its depth."""
    scores_BSK = draft_input.topk_scores
    tokens_BSK = draft_input.topk_index
    lanes = lanes_of(tokens_BSK[:, 0], scores_BSK[:, 0], draft_input.hidden[:, 0], config)
    for depth in range(1, config.num_steps):
        parts = (scores_BSK[:, depth], tokens_BSK[:, depth])
        if config.is_sampled:  # each lane has one child
            scores_BKK, tokens_BKK = (part[:, :, None] for part in parts)
        else:
            scores_BKK, tokens_BKK = (part[:, None].expand(-1, config.topk, -1) for part in parts)
        lanes = expand(lanes, scores_BKK, tokens_BKK, lanes.hidden, config)
    draft_prob = draft_input.draft_prob
    if draft_prob is not None:  # one distribution for each node that has children
        deeper = draft_prob[:, 1:].repeat_interleave(config.topk, dim=1)
        draft_prob = torch.cat([draft_prob[:, :1], deeper], dim=1)
    return replace(lanes.candidates, draft_prob=draft_prob)
