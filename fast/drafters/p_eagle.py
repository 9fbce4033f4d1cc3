"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts every depth in one forward, in draft-extend."""

from typing import NamedTuple

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Head, Placement, check_topk
from specsim.core.eagle import Mask, PEagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.product import ProductInput
from specsim.fast.drafters.autoregressive import best_drafts
from specsim.fast.drafters.eagle3 import Eagle3Head
from specsim.fast.drafters.p_eagle_rows import LastRows, NewPositions, head_rows, last_rows
from specsim.fast.drafters.product import DraftShape, ProductDrafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.kv import draft_kv
from specsim.fast.model.metadata import causal_metadata
from specsim.fast.targets.decoder import DecoderTarget
from specsim.fast.vocabulary.draft_distribution import DrawnDrafts, Loop, Root, Vocabulary, draw_drafts, inverse_of


class Layout(NamedTuple):
    """Rows of one call of the head."""

    row_starts: torch.Tensor  # i64 [B+1]
    num_rows: int  # R
    most_rows: int  # of one request
    has_equal_rows: bool  # in every batch of the phase


class PEagleDrafter(ProductDrafter[ProductInput]):
    """An EAGLE-3 head whose prefill and draft-extend run S-1 mask rows after each request's own, see the reference.

    Draft-extend has the same number of rows for each request: S + 1, and S-1 mask rows.
    """

    def __init__(self, head: Head, config: SpecConfig, mask: Mask, vocab_size: int) -> None:
        check_topk(config, head.draft_vocab_size)
        device = mask.features.device
        super().__init__(ProductInput, DraftShape(head.hidden_size, vocab_size, mask.features.dtype), config, device)
        self._head = head
        self._mask = mask
        self._depths = torch.arange(config.num_steps, dtype=torch.int32, device=device)
        self._vocabulary = Vocabulary(head.d2t, None if head.d2t is None else inverse_of(head.d2t, vocab_size))
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers
        self.num_mask_rows = config.num_steps - 1

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> ProductInput:
        """Run the head over a prefill, which drafts the first round's tree."""
        counts = prefill.row_starts.diff()
        starts = prefill.row_starts + self.num_mask_rows * torch.arange(batch.size + 1, device=self._device)
        on_host = counts.tolist()
        most = max(on_host, default=0) + self.num_mask_rows
        layout = Layout(starts, sum(on_host) + self.num_mask_rows * batch.size, most, has_equal_rows=False)
        new = NewPositions(features_RF.contiguous(), prefill.row_starts, prefill.start_lens, counts)
        return self._draft(batch, new, layout, next_tokens, pools, self.zeros(batch.size).to(self._device))

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: ProductInput | None = None
    ) -> ProductInput:
        """Run the head over the accepted rows, which drafts the next round's tree."""
        extend = draft_extend_input
        most = self._config.num_steps + 1 + self.num_mask_rows
        starts = torch.arange(0, (batch.size + 1) * most, most, device=self._device)
        layout = Layout(starts, batch.size * most, most, has_equal_rows=True)
        new = NewPositions(extend.hidden, extend.row_starts, extend.seq_lens, extend.num_accepted_tokens)
        out = self.zeros(batch.size).to(self._device) if out is None else out
        return self._draft(batch, new, layout, extend.bonus_tokens, pools, out)

    def _draft(
        self,
        batch: Batch,
        new: NewPositions,
        layout: Layout,
        bonus_tokens: torch.Tensor,
        pools: KVPool,
        out: ProductInput,
    ) -> ProductInput:
        """Run each request's new rows and its mask rows in one forward, and draft from the last S of them."""
        starts, num_rows, most_rows, has_equal_rows = layout
        limits = (self.num_mask_rows, self._config.length_limit)
        rows = head_rows(batch, new, starts, num_rows, most_rows, self._mask, limits, pools)
        metadata = causal_metadata(
            batch.req_pool_indices,
            new.start_lens,
            starts,
            max_rows=most_rows,
            has_equal_rows=has_equal_rows,
            slots_R=rows.slots,
            pools=pools,
        )
        hidden_RH = self._head.forward(rows.ids, self._head.fuse(rows.features), metadata, draft_kv(pools))
        self._keep_drafts(batch, last_rows(batch, new, starts, hidden_RH, rows.slots, out.hidden), out)
        out.bonus_tokens.copy_(bonus_tokens)
        return out

    def _keep_drafts(self, batch: Batch, last: LastRows, out: ProductInput) -> None:
        """Draft K tokens of every depth, the best ones or sampled ones."""
        config = self._config
        hidden_RH = last.hidden.flatten(0, 1)
        logits_RV, best = best_drafts(self._head, hidden_RH, config, config.topk, last.slots.flatten())
        scores_SBK, index_SBK = (rows.unflatten(0, last.slots.shape) for rows in best)
        if config.is_sampled:
            for depth, logits_BV in enumerate(logits_RV.unflatten(0, last.slots.shape)):
                loop = Loop(self._depths[depth - 1 :], last.slots[depth], config.num_steps) if depth else None
                drafts = DrawnDrafts(scores_SBK[depth], index_SBK[depth])
                draw_drafts(
                    batch, logits_BV, Root(last.root_lens), self._vocabulary, config, drafts, out.draft_prob, loop
                )
        out.topk_scores.copy_(scores_SBK.transpose(0, 1))
        out.topk_index.copy_(index_SBK.transpose(0, 1))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)


def make(
    drafter: DrafterCheckpoint[PEagleConfig], target: DecoderTarget, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make a P-EAGLE head as the drafter of a fast engine."""
    tensors = drafter.tensors_on(on.ranks)
    head = Eagle3Head(drafter.config, tensors, target, on)
    return PEagleDrafter(head, config, Mask.of(drafter.config, drafter.tensors, on), target.config.vocab_size)
