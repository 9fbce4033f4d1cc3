"""Multi-token prediction by S modules (DeepSeek-V3, arXiv 2412.19437), all of which run in draft-extend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.mtp import MtpConfig, check_modules
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.product import ProductInput
from specsim.core.rank_part import kv_layout_of
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter, DecoderHead, best_drafts
from specsim.fast.drafters.mtp_rows import NewFeatures, Spans, SpanShape, gather_rows, spans_of
from specsim.fast.drafters.product import DraftShape, ProductDrafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.kv import draft_kv
from specsim.fast.model.metadata import AttentionMetadata, causal_metadata, known_token
from specsim.fast.model.rows import HiddenRows, rms_norm
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2
from specsim.fast.targets.decoder import DecoderTarget, run_layer
from specsim.fast.vocabulary.draft_distribution import DrawnDrafts, Loop, Root, Vocabulary, draw_drafts, inverse_of

_HEAD = ("lm_head.weight", "d2t")


class MtpModule(DecoderHead):
    """Module k, with both normed inputs in one buffer for eh_proj, and KV in layer k of the draft buffer."""

    def __init__(
        self,
        config: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        target: DecoderTarget,
        on: Placement,
        index: int = 0,
    ) -> None:
        prefix = f"modules.{index}."
        names = _HEAD if index == 0 else ()  # of the drafter, on the first module, which reads out all of them
        module = {name: tensors[name] for name in names if name in tensors}
        module |= {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        super().__init__(config, module, target, on)
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


@kernel
@no_type_check
def _ids_kernel(
    spans_ptrs,
    token_ids_ptr,
    table_rows_ptr,
    topk_index_ptr,
    out_ptr,
    depth,
    token_columns,
    num_steps,
    topk,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the ids that one depth's module reads: known tokens, and the first lane's drafts after them."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(table_rows_ptr + request)
    end = tl.load(spans_ptrs.end_lens + request)
    low = tl.load(spans_ptrs.row_starts + request)
    rows = low + tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mask = rows < tl.load(spans_ptrs.row_starts + request + 1)
    column = tl.load(spans_ptrs.first_lens + request) + rows - low
    live = mask & (row >= 0) & (column < end)
    token = column + 1 + depth
    unknown = tl.maximum(token - end, 0)  # 1 for the first draft
    committed = known_token(token_ids_ptr, token_columns, row, token, mask=live & (unknown == 0))
    draft = topk_index_ptr + (request * num_steps + unknown - 1) * topk
    drafted = tl.load(draft, mask=live & (unknown > 0), other=0)
    tl.store(out_ptr + rows, tl.where(unknown > 0, drafted, committed), mask=mask)


@kernel
@no_type_check
def _last_kernel(
    spans_ptrs,
    hidden_ptr,
    last_ptr,
    out_ptr,
    depth,
    num_steps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the hidden state of a request's last row, to a depth's entry of the draft input too."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(spans_ptrs.end_lens + request) - tl.load(spans_ptrs.first_lens + request)
    last_row = tl.load(spans_ptrs.row_starts + request) + tl.maximum(count, 1) - 1
    offs = tl.arange(0, BLOCK)
    values = tl.load(hidden_ptr + last_row * SIZE + offs, mask=offs < SIZE)
    tl.store(last_ptr + request * SIZE + offs, values, mask=offs < SIZE)
    tl.store(out_ptr + (request * num_steps + depth) * SIZE + offs, values, mask=offs < SIZE)


def ids_of(
    batch: Batch, spans: Spans, shape: SpanShape, depth: int, drafts: ProductInput, pools: KVPool
) -> torch.Tensor:
    """Find the ids i64 [R] that a module reads: token p+1+depth, or the first lane's draft of it."""
    ids_R = batch.seq_lens.new_empty(shape.num_rows)
    block = block_of(shape.most_rows, 128)
    _ids_kernel[batch.size, ceil_div(shape.most_rows, block)](
        spans_ptrs=spans,
        token_ids_ptr=pools.token_ids,
        table_rows_ptr=batch.req_pool_indices,
        topk_index_ptr=drafts.topk_index,
        out_ptr=ids_R,
        depth=depth,
        token_columns=pools.token_ids.shape[1],
        num_steps=drafts.topk_index.shape[1],
        topk=drafts.topk_index.shape[2],
        BLOCK_R=block,
    )
    return ids_R


def last_hidden(spans: Spans, hidden_RH: torch.Tensor, depth: int, drafts: ProductInput) -> torch.Tensor:
    """Copy every request's last hidden state, [B, H], and put it into the draft input."""
    size, num_steps, hidden_size = drafts.hidden.shape
    last_BH = hidden_RH.new_empty(size, hidden_size)
    _last_kernel[(size,)](
        spans_ptrs=spans,
        hidden_ptr=hidden_RH,
        last_ptr=last_BH,
        out_ptr=drafts.hidden,
        depth=depth,
        num_steps=num_steps,
        SIZE=hidden_size,
        BLOCK=next_power_of_2(hidden_size),
    )
    return last_BH


class MtpDrafter(ProductDrafter[ProductInput]):
    """The first S modules of a checkpoint as a step drafter, see the reference.

    Draft-extend has the same number of rows for each request: S + 1, and S-1 that are written again.
    """

    def __init__(
        self,
        drafter: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        target: DecoderTarget,
        on: Placement,
        config: SpecConfig,
    ) -> None:
        check_modules(drafter, config)
        shape = DraftShape(drafter.model.hidden_size, target.config.vocab_size, on.dtype)
        super().__init__(ProductInput, shape, config, on.device)
        self._modules = [MtpModule(drafter, tensors, target, on, depth) for depth in range(config.num_steps)]
        d2t = self._modules[0].d2t
        self._vocabulary = Vocabulary(d2t, None if d2t is None else inverse_of(d2t, target.config.vocab_size))
        self._is_chained = drafter.hidden_chain
        self._depths = torch.arange(config.num_steps, dtype=torch.int32, device=on.device)
        self.kv_layout = replace(self._modules[0].kv_layout, num_layers=config.num_steps)
        self.feature_layers = drafter.feature_layers
        self.lookahead = config.num_steps - 1 if drafter.boundary == "rewrite" else 0

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> ProductInput:
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
        out: ProductInput | None = None,
    ) -> ProductInput:
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
        out: ProductInput,
    ) -> ProductInput:
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
            logits_BV, best = best_drafts(self._modules[0], last_BH, self._config, self._config.topk)
            self._keep_drafts(batch, logits_BV, DrawnDrafts(*best), spans, depth, out)
            hidden_RH = hidden_RH if self._is_chained else target_RH
        out.bonus_tokens.copy_(bonus_tokens)
        return out

    def _keep_drafts(
        self, batch: Batch, logits_BV: torch.Tensor, drafts: DrawnDrafts, spans: Spans, depth: int, out: ProductInput
    ) -> None:
        """Keep the best drafts at a depth, or draw others in their place."""
        config = self._config
        if config.is_sampled:
            loop = Loop(self._depths[depth - 1 :], None, config.num_steps) if depth else None
            root = Root(spans.end_lens)
            draw_drafts(batch, logits_BV, root, self._vocabulary, config, drafts, out.draft_prob, loop)
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
        return MtpDrafter(shape, tensors, target, on, config)
    module = MtpModule(shape, tensors, target, on)
    return AutoregressiveDrafter(module, config, on.dtype, on.device, target.config.vocab_size)
