"""Heads that are a decoder over features of the target, and the drafter that runs one once in each step.

Its launches are the same in every step: kernels read the step's number on the device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig, Head, Placement, check_topk
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.rank_group import RankGroup
from specsim.core.rank_part import kv_layout_of
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import Lanes, expand, start_lanes
from specsim.fast.drafting.lanes import lane_metadata
from specsim.fast.kv import draft_kv, draft_rows, duplicate_tails
from specsim.fast.layers import Weights
from specsim.fast.model.metadata import AttentionMetadata, extend_metadata, prefill_metadata
from specsim.fast.model.rotary import ForwardContext, inverse_frequencies, rotations
from specsim.fast.model.rows import HiddenRows, Norm, embed
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2
from specsim.fast.runtime.peer_memory import join_slices, without_padding
from specsim.fast.targets.decoder import DecoderTarget, on_device
from specsim.fast.vocabulary.draft_distribution import DrawnDrafts, Loop, Root, Vocabulary, draw_drafts, inverse_of
from specsim.fast.vocabulary.shared_topk import can_share, shared_topk
from specsim.fast.vocabulary.topk import draft_topk


class DecoderHead:
    """A decoder over a target's features, with a head of its own or the target's, without its forward.

    Ranks share its weights where the kind allows it.
    """

    bonus_columns: int = 0

    def __init__(
        self, config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target: DecoderTarget, on: Placement
    ) -> None:
        self._target = target
        self._part = None if on.ranks is None else on.ranks.part
        head = tensors.get("lm_head.weight")  # None: the target's
        self.vocabulary_ranks = target.ranks if head is None else on.ranks
        if head is not None and self._part is not None:
            tensors = {**tensors, "lm_head.weight": self._part.padded(head, config.draft_vocab_size)}
        self._model = config.model if self._part is None else self._part.config(config.model)
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        weights = on_device(floating, on.device, on.dtype)
        self._weights = Weights(weights, batch_invariant=on.batch_invariant, ranks=on.ranks)
        self._inverse_D = inverse_frequencies(config.model.rope).to(on.device)
        self._amplitude = config.model.rope.amplitude
        self._num_layers = config.model.num_layers
        d2t = tensors.get("d2t")
        self.d2t = None if d2t is None else d2t.to(on.device, torch.int64)
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of its KV, of this rank's heads."""
        return kv_layout_of(self._model, self._part)

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, as the first hidden state is a target feature."""
        return features_RF

    def rank_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute logits of the tokens of this rank's slice, -inf beyond them, or of all where no ranks share them."""
        rows = self._head_rows(hidden_RH)
        if self._weights.get("lm_head.weight") is None:
            return self._target.rank_logits(rows.normed())
        logits_RC = self._weights.project(rows, "lm_head")
        ranks = self.vocabulary_ranks
        return logits_RC if ranks is None else without_padding(ranks, logits_RC, self.draft_vocab_size)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        logits_RV = self.rank_logits(hidden_RH)
        ranks = self.vocabulary_ranks
        return logits_RV if ranks is None else join_slices(ranks, logits_RV, self.draft_vocab_size)

    def _head_rows(self, hidden_RH: torch.Tensor) -> HiddenRows:
        """Return the rows that the head reads."""
        return HiddenRows(hidden_RH)

    def _norm(self, name: str) -> Norm:
        return Norm(self._weights[f"{name}.weight"], self._model.rms_norm_eps)

    def _forward(self, metadata: AttentionMetadata, kv: KVBuffer, dtype: torch.dtype) -> ForwardContext:
        """Collect what all layers of one forward share."""
        angles = rotations(metadata.positions, self._inverse_D, dtype, self._amplitude)
        return ForwardContext(angles, metadata, kv)

    def _joined(self, input_ids_R: torch.Tensor, embedding_VH: torch.Tensor, hidden_RH: torch.Tensor) -> HiddenRows:
        """Write embeddings and hidden states to one buffer for the first projection: rows [R, 2H]."""
        num_rows, width = hidden_RH.shape
        joined = hidden_RH.new_empty(num_rows, 2 * width)
        embed(input_ids_R, embedding_VH, out=joined[:, :width])
        joined[:, width:].copy_(hidden_RH)
        return HiddenRows(joined)


def best_drafts(
    head: Any,
    hidden_RH: torch.Tensor,
    config: SpecConfig,
    count: int,
    slots_R: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Select the `count` best drafts of rows by a head: (logits, (scores, ids)).

    head: a Head; with `vocabulary_ranks` it has `rank_logits` too. Where ranks share the vocabulary, the logits are
    those of this rank's slice, unless drafts are drawn from all.
    """
    ranks: RankGroup | None = getattr(head, "vocabulary_ranks", None)
    size = head.draft_vocab_size
    if ranks is None or config.is_sampled or not can_share(ranks, size, count):
        logits_RV = head.logits(hidden_RH)
        return logits_RV, draft_topk(logits_RV, count, head.d2t, slots_R, config.score, out)
    logits_RC = head.rank_logits(hidden_RH)
    return logits_RC, shared_topk(ranks, logits_RC, size, count, head.d2t, slots_R, config.score, out)


@kernel
@no_type_check
def _last_rows_kernel(
    hidden_ptr,
    row_starts_ptr,
    counts_ptr,
    bonus_tokens_ptr,
    out_ptr,
    out_tokens_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy each request's last hidden state and its bonus token."""
    await_input(PDL)
    request = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    row = tl.load(row_starts_ptr + request) + tl.load(counts_ptr + request) - 1
    values = tl.load(hidden_ptr + row.to(tl.int64) * SIZE + offs, mask=offs < SIZE)
    tl.store(out_ptr + request.to(tl.int64) * SIZE + offs, values, mask=offs < SIZE)
    tl.store(out_tokens_ptr + request, tl.load(bonus_tokens_ptr + request))


class Last(NamedTuple):
    """The last row of each request, from which the first drafts are made."""

    row_starts: torch.Tensor  # i64 [B+1]
    counts: torch.Tensor  # [B], rows of a request up to its last
    bonus_tokens: torch.Tensor  # [B]


def take_last(rows_RX: torch.Tensor, last: Last, out: torch.Tensor, out_tokens: torch.Tensor) -> None:
    """Copy each request's last row to `out` [B, X], and its bonus token."""
    size = out.shape[1]
    _last_rows_kernel[(len(out),)](
        hidden_ptr=rows_RX,
        row_starts_ptr=last.row_starts,
        counts_ptr=last.counts,
        bonus_tokens_ptr=last.bonus_tokens,
        out_ptr=out,
        out_tokens_ptr=out_tokens,
        SIZE=size,
        BLOCK=next_power_of_2(size),
    )


class AutoregressiveDrafter(StepDrafter):
    """A step drafter with a head, for a target of `vocab_size` tokens."""

    def __init__(
        self, head: Head, config: SpecConfig, dtype: torch.dtype, device: torch.device, vocab_size: int
    ) -> None:
        check_topk(config, head.draft_vocab_size)
        self._head = head
        self._config = config
        self._is_sampled = config.is_sampled
        self._dtype = dtype
        self._device = device
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers
        self.bonus_columns = head.bonus_columns
        self.hidden_size = head.hidden_size
        self._vocab_size = vocab_size
        self._vocabulary = Vocabulary(head.d2t, None if head.d2t is None else inverse_of(head.d2t, vocab_size))

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> AutoregressiveInput:
        """Run the head over a prefill, and draft the first round's root children."""
        rows = draft_rows(prefill, next_tokens, self.bonus_columns)
        metadata = prefill_metadata(batch, rows, pools)
        last = Last(rows.row_starts, rows.row_starts.diff(), next_tokens)
        hidden_RH = self._head.forward(rows.input_ids, self._head.fuse(features_RF), metadata, draft_kv(pools))
        return self._first_drafts(batch, hidden_RH, last, Root(batch.seq_lens), self._empty(batch.size))

    def _empty(self, size: int) -> AutoregressiveInput:
        """Allocate a draft input."""

        def table(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        return AutoregressiveInput(
            bonus_tokens=table(size, dtype=torch.int32),
            topk_scores=table(size, self._config.topk),
            topk_index=table(size, self._config.topk, dtype=torch.int64),
            hidden=table(size, self.hidden_size, dtype=self._dtype),
            draft_prob=table(size, self._vocab_size) if self._config.has_draft_prob else None,
        )

    def zeros(self, size: int) -> AutoregressiveInput:
        """Make the draft input of `size` padded requests, on the host."""
        vocab_size = self._vocab_size if self._config.has_draft_prob else None
        return AutoregressiveInput.zeros(size, self._config.topk, self.hidden_size, self._dtype, vocab_size)

    def buffers(self, size: int) -> Lanes:
        """Make the lanes of `size` padded requests, on the host."""
        return Lanes.padded(size, self.hidden_size, self._config, self._dtype, self._vocab_size)

    def extend(
        self,
        batch: Batch,
        draft_extend_input: DraftExtendInput,
        pools: KVPool,
        *,
        out: AutoregressiveInput | None = None,
    ) -> AutoregressiveInput:
        """Run the head over the accepted rows, and draft the next round's root children."""
        out = self._empty(batch.size) if out is None else out
        extend = draft_extend_input
        metadata = extend_metadata(batch, draft_extend_input, pools, self.bonus_columns)
        fused_RH = self._head.fuse(extend.hidden)
        hidden_RH = self._head.forward(extend.input_ids, fused_RH, metadata, draft_kv(pools))
        last = Last(extend.row_starts, extend.num_accepted_tokens, extend.bonus_tokens)
        root = Root(extend.seq_lens, extend.num_accepted_tokens)
        return self._first_drafts(batch, hidden_RH, last, root, out)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def with_config(self, config: SpecConfig) -> Self:
        return type(self)(self._head, config, self._dtype, self._device, self._vocab_size)

    def _first_drafts(
        self, batch: Batch, hidden_RH: torch.Tensor, last: Last, root: Root, out: AutoregressiveInput
    ) -> AutoregressiveInput:
        take_last(hidden_RH, last, out.hidden, out.bonus_tokens)
        return self._draft_first(batch, root, out)

    def _draft_first(self, batch: Batch, root: Root, out: AutoregressiveInput) -> AutoregressiveInput:
        """Draft the root's children from out.hidden."""
        best = out.topk_scores, out.topk_index
        logits_BV, _ = best_drafts(self._head, out.hidden, self._config, self._config.topk, out=best)
        self._draw(batch, logits_BV, root, best, out.draft_prob)
        return out

    def _draw(
        self,
        batch: Batch,
        logits_RV: torch.Tensor,
        root: Root,
        out: tuple[torch.Tensor, torch.Tensor],
        draft_prob_RV: torch.Tensor | None,
        loop: Loop | None = None,
    ) -> None:
        """Replace the best drafts by drawn ones, where the verifier needs drawn drafts."""
        if self._is_sampled:
            draw_drafts(batch, logits_RV, root, self._vocabulary, self._config, DrawnDrafts(*out), draft_prob_RV, loop)

    def propose(self, batch: Batch, draft_input: AutoregressiveInput, pools: KVPool) -> Candidates:
        """Run S-1 forwards of K lanes."""
        self._copy_tails(batch, pools)
        lanes = start_lanes(draft_input, self._config)
        for _ in range(self._config.num_steps - 1):
            self.step(batch, lanes, pools)
        return lanes.candidates

    def start(self, batch: Batch, draft_input: AutoregressiveInput, lanes: Lanes, pools: KVPool) -> None:
        """Copy the prefix's tail to every lane, and start the lanes with the root's children."""
        self._copy_tails(batch, pools)
        start_lanes(draft_input, self._config, out=lanes)

    def _copy_tails(self, batch: Batch, pools: KVPool) -> None:
        duplicate_tails(batch, self._config, pools, self.bonus_columns)

    def _run(self, batch: Batch, lanes: Lanes, pools: KVPool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the lanes' tokens: (hidden [B·K, H], slots [B·K] that are -1 for dropped rows, None: no row is)."""
        metadata = lane_metadata(batch, lanes, self._config, pools, self.bonus_columns)
        hidden_RH = self._head.forward(lanes.tokens.view(-1), lanes.hidden.flatten(0, 1), metadata, draft_kv(pools))
        return hidden_RH, metadata.slots

    def step(self, batch: Batch, lanes: Lanes, pools: KVPool) -> None:
        """Run one draft forward of all lanes, with metadata built for their step."""
        config = self._config
        shape = lanes.tokens.shape
        hidden_RH, slots_R = self._run(batch, lanes, pools)
        count = 1 if self._is_sampled else config.topk
        logits_RV, best = best_drafts(self._head, hidden_RH, config, count, slots_R)
        loop = Loop(lanes.step, slots_R, config.num_steps)
        self._draw(batch, logits_RV, Root(batch.seq_lens), best, lanes.candidates.draft_prob, loop)
        topk_scores, topk_index = (rows.unflatten(0, shape) for rows in best)
        expand(lanes, topk_scores, topk_index, hidden_RH.unflatten(0, shape), config)
