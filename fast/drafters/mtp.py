"""Multi-token prediction by S modules (DeepSeek-V3, arXiv 2412.19437), all of which run in draft-extend."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.mtp import MtpConfig, MtpInput, check_modules
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.rank_group import RankGroup
from specsim.core.rank_part import kv_layout_of
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.fast.drafters.best_drafts import best_drafts
from specsim.fast.drafters.mtp_drafts import ids_of, last_hidden
from specsim.fast.drafters.mtp_rows import NewFeatures, Spans, SpanShape, gather_rows, spans_of
from specsim.fast.drafters.product import DraftShape, ProductDrafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.kv import draft_kv
from specsim.fast.model.metadata import AttentionMetadata, causal_metadata
from specsim.fast.model.rows import HiddenRows, rms_norm
from specsim.fast.targets.decoder import DecoderTarget, run_layer
from specsim.fast.vocabulary.draft_distribution import DrawnDrafts, Loop, Root, Vocabulary, draw_drafts


class MtpModule(DecoderHead):
    """Module k, with both normed inputs in one buffer for eh_proj, and KV in layer k of the draft buffer."""

    def __init__(
        self,
        config: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        target: DecoderTarget,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        ranks: RankGroup | None = None,
        index: int = 0,
    ) -> None:
        prefix = f"modules.{index}."
        module = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        super().__init__(config, module, target, dtype, device, batch_invariant, ranks)
        self._target = target
        self.vocabulary_ranks = target.ranks
        self._index = index

    @property
    def kv_layout(self) -> KVLayout:
        """Shape of the KV of this module alone."""
        return replace(kv_layout_of(self._model, self._part), num_layers=1)

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through the module, and write their KV: hidden after the norm, [R, H]."""
        weights = self._weights
        both = hidden_RH.new_empty(len(hidden_RH), 2 * self.hidden_size)
        embedded_RH, normed_RH = both.chunk(2, dim=1)
        self._target.normed_embedding(input_ids_R, self._norm("enorm"), embedded_RH)
        rms_norm(hidden_RH, *self._norm("hnorm"), out=normed_RH)
        forward = self._forward(metadata, kv, hidden_RH.dtype)
        projected_RH = weights.project(HiddenRows(both), "eh_proj")
        rows = HiddenRows(projected_RH, self._norm("input_layernorm"))
        rows, _ = run_layer(rows, weights, self._model, self._index, forward, self._norm("norm"))
        return rows.normed()

    def rank_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute logits of the tokens of this rank's slice of the target's head."""
        return self._target.rank_logits(hidden_RH)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden_RH)


class MtpDrafter(ProductDrafter[MtpInput]):
    """The first S modules of a checkpoint as a step drafter, see the reference.

    Draft-extend has the same number of rows for each request: S + 1, and S-1 that are written again.
    """

    def __init__(
        self,
        drafter: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        target: DecoderTarget,
        dtype: torch.dtype,
        device: torch.device,
        config: SpecConfig,
        batch_invariant: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        check_modules(drafter, config, target.config.vocab_size)
        shape = DraftShape(drafter.model.hidden_size, target.config.vocab_size, dtype)
        super().__init__(MtpInput, shape, config, device)
        self._modules = [
            MtpModule(drafter, tensors, target, dtype, device, batch_invariant, ranks, k)
            for k in range(config.num_steps)
        ]
        self._is_chained = drafter.hidden_chain
        self._depths = torch.arange(config.num_steps, dtype=torch.int32, device=device)
        self.kv_layout = replace(self._modules[0].kv_layout, num_layers=config.num_steps)
        self.feature_layers = drafter.feature_layers
        self.lookahead = config.num_steps - 1 if drafter.boundary == "rewrite" else 0

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> MtpInput:
        """Run all modules over a prefill, which drafts the first round's tree."""
        spans = spans_of(batch, prefill.start_lens, prefill.row_starts.diff(), self.lookahead, 0, pools)
        counts = spans.end_lens - spans.first_lens
        spans.row_starts[:1].zero_()
        spans.row_starts[1:].copy_(counts.cumsum(0))
        on_host = counts.tolist()
        shape = SpanShape(sum(on_host), max(on_host, default=0), self.lookahead, has_equal_rows=False)
        new = NewFeatures(features_RF.contiguous(), prefill.row_starts)
        return self._draft(batch, spans, new, shape, next_tokens, pools, self.zeros(batch.size).to(self._device))

    def extend(
        self,
        batch: Batch,
        draft_extend_input: DraftExtendInput,
        pools: KVPool,
        *,
        out: MtpInput | None = None,
    ) -> MtpInput:
        """Run all modules over the accepted rows, which drafts the next round's tree."""
        extend = draft_extend_input
        most_rows = self.lookahead + self._config.num_steps + 1
        shape = SpanShape(batch.size * most_rows, most_rows, self.lookahead, has_equal_rows=True)
        spans = spans_of(batch, extend.seq_lens, extend.num_accepted_tokens, self.lookahead, most_rows, pools)
        out = self.zeros(batch.size).to(self._device) if out is None else out
        return self._draft(
            batch, spans, NewFeatures(extend.hidden, extend.row_starts), shape, extend.bonus_tokens, pools, out
        )

    def _draft(
        self,
        batch: Batch,
        spans: Spans,
        new: NewFeatures,
        shape: SpanShape,
        bonus_tokens: torch.Tensor,
        pools: KVPool,
        out: MtpInput,
    ) -> MtpInput:
        """Run all modules over each request's rows, each with the drafts of those before it."""
        target_RH, slots_R = gather_rows(batch, spans, new, shape, self._config.length_limit, pools)
        metadata = causal_metadata(
            batch.req_pool_indices,
            spans.first_lens,
            spans.row_starts,
            max_rows=shape.most_rows,
            has_equal_rows=shape.has_equal_rows,
            slots_R=slots_R,
            pools=pools,
        )
        hidden_RH = target_RH
        for depth, module in enumerate(self._modules):
            ids_R = ids_of(batch, spans, shape, depth, out, pools)
            hidden_RH = module.forward(ids_R, hidden_RH, metadata, draft_kv(pools))
            last_BH = last_hidden(spans, hidden_RH, depth, out)
            logits_BV, best = best_drafts(module, last_BH, self._config, self._config.topk)
            self._keep_drafts(batch, logits_BV, DrawnDrafts(*best), spans, depth, out)
            hidden_RH = hidden_RH if self._is_chained else target_RH
        out.bonus_tokens.copy_(bonus_tokens)
        return out

    def _keep_drafts(
        self, batch: Batch, logits_BV: torch.Tensor, drafts: DrawnDrafts, spans: Spans, depth: int, out: MtpInput
    ) -> None:
        """Keep the best drafts at a depth, or draw others in their place."""
        config = self._config
        if config.is_sampled:
            loop = Loop(self._depths[depth - 1 :], None, config.num_steps) if depth else None
            draw_drafts(batch, logits_BV, Root(spans.end_lens), Vocabulary(), config, drafts, out.draft_prob, loop)
        out.topk_scores[:, depth].copy_(drafts.topk_scores)
        out.topk_index[:, depth].copy_(drafts.topk_index)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._modules[0].logits(hidden_RH)


def make(
    drafter: DrafterCheckpoint[MtpConfig], target: DecoderTarget, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make MTP modules the drafter of a fast engine: one of them in every step, or several in draft-extend."""
    shape = drafter.config
    tensors = drafter.tensors_on(on.ranks)
    if shape.num_modules > 1:
        return MtpDrafter(shape, tensors, target, on.dtype, on.device, config, on.batch_invariant, on.ranks)
    module = MtpModule(shape, tensors, target, *on)
    return AutoregressiveDrafter(module, config, on.dtype, on.device, target.config.vocab_size)
