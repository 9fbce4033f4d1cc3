"""Drafters that run a small decoder once a step: every step the same launches, its number read on the device."""

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.drafter import Head
from specsim.core.errors import InputError
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.fast.drafting import Lanes, expand, start_lanes
from specsim.fast.extend import shift_left
from specsim.fast.kv import duplicate_tails
from specsim.fast.model.metadata import extend_metadata, lane_metadata, prefill_metadata
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.vocabulary.draft_distribution import Root, draw_drafts
from specsim.fast.vocabulary.topk import draft_topk


@kernel
def _last_rows_kernel(
    hidden_ptr, row_starts_ptr, counts_ptr, bonus_tokens_ptr, out_ptr, out_tokens_ptr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_input(PDL)
    request, offs = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(row_starts_ptr + request) + tl.load(counts_ptr + request) - 1
    values = tl.load(hidden_ptr + row.to(tl.int64) * SIZE + offs, mask=offs < SIZE)
    tl.store(out_ptr + request.to(tl.int64) * SIZE + offs, values, mask=offs < SIZE)
    tl.store(out_tokens_ptr + request, tl.load(bonus_tokens_ptr + request))


class AutoregressiveDrafter:
    """The drafter protocol of core.drafter around a head, for a target of `vocab_size` tokens; a round calls start
    once and step S-1 times.
    """

    def __init__(self, head: Head, config: SpecConfig, dtype: torch.dtype, device: torch.device, vocab_size: int):
        if config.topk > head.draft_vocab_size:
            raise InputError("topk", config.topk, f"at most the draft vocabulary, {head.draft_vocab_size}")
        self._head, self._config, self._dtype, self._device = head, config, dtype, device
        self.kv_layout, self.feature_layers = head.kv_layout, head.feature_layers
        self.hidden_size, self._vocab_size = head.hidden_size, vocab_size
        self._vocabulary = head.d2t, None if head.d2t is None else _inverse(head.d2t, vocab_size)

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        ids, metadata = shift_left(prefill, next_tokens), prefill_metadata(batch, prefill, pools)
        k, has_law = self._config.topk, self._config.has_draft_prob
        out = DraftInput(
            topk_p=torch.empty(batch.size, k, device=self._device),
            topk_index=torch.empty(batch.size, k, dtype=torch.int64, device=self._device),
            hidden=torch.empty(batch.size, self.hidden_size, dtype=self._dtype, device=self._device),
            bonus_tokens=torch.empty(batch.size, dtype=torch.int32, device=self._device),
            draft_prob=torch.empty(batch.size, self._vocab_size, device=self._device) if has_law else None,
        )
        starts, counts = prefill.row_starts, prefill.row_starts.diff()
        hidden_RH = self._head.forward(ids, self._head.fuse(features_RF), metadata, pools.draft)
        return self._first_drafts(batch, hidden_RH, (starts, counts), next_tokens, Root(batch.seq_lens), out)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, out: DraftInput) -> DraftInput:
        extend, metadata = draft_extend_input, extend_metadata(batch, draft_extend_input, pools)
        fused_RH = self._head.fuse(extend.hidden)
        hidden_RH = self._head.forward(extend.input_ids, fused_RH, metadata, pools.draft)
        last, root = (extend.row_starts, extend.num_accepted_tokens), Root(extend.seq_lens, extend.num_accepted_tokens)
        return self._first_drafts(batch, hidden_RH, last, extend.bonus_tokens, root, out)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def idle(self) -> DraftInput:
        vocab_size = self._vocab_size if self._config.has_draft_prob else None
        return DraftInput.empty(self._config.topk, self.hidden_size, self._dtype, vocab_size).to(self._device)

    def _first_drafts(self, batch: Batch, hidden_RH, last, bonus_tokens, root: Root, out: DraftInput) -> DraftInput:
        block = triton.next_power_of_2(self.hidden_size)
        _last_rows_kernel[(len(out.hidden),)](
            hidden_RH, *last, bonus_tokens, out.hidden, out.bonus_tokens, SIZE=self.hidden_size, BLOCK=block
        )
        logits_BV = self._head.logits(out.hidden)
        best = draft_topk(logits_BV, self._config.topk, self._head.d2t, out=(out.topk_p, out.topk_index))
        self._draw(batch, logits_BV, root, best, out.draft_prob)
        return out

    def _draw(self, batch: Batch, logits_RV, root: Root, out, law, loop=None) -> None:
        """Sampled drafts in the place of the best, where the verifier wants that."""
        if self._config.is_sampled:
            is_gumbel = self._config.verifier == "gumbel"
            draw_drafts(batch, logits_RV, root, self._vocabulary, is_gumbel, out, law, loop)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        lanes = Lanes.empty(batch.size, self.hidden_size, self._config, self._dtype, self._device, self._vocab_size)
        self.start(batch, draft_input, lanes, pools)
        for _ in range(self._config.num_steps - 1):
            self.step(batch, lanes, pools)
        return lanes.candidates

    def start(self, batch: Batch, draft_input: DraftInput, lanes: Lanes, pools: KVPool) -> None:
        """Copy the prefix's tail into every lane and begin the lanes with the root's children."""
        duplicate_tails(batch, self._config, pools)
        start_lanes(draft_input, lanes, self._config)

    def step(self, batch: Batch, lanes: Lanes, pools: KVPool) -> None:
        """One draft forward of all lanes, its metadata built for the step they are at."""
        config, shape = self._config, lanes.tokens.shape
        metadata = lane_metadata(batch, lanes, config, pools)
        hidden_RH = self._head.forward(lanes.tokens.view(-1), lanes.hidden.flatten(0, 1), metadata, pools.draft)
        logits_RV = self._head.logits(hidden_RH)
        best = draft_topk(logits_RV, 1 if config.is_sampled else config.topk, self._head.d2t, metadata.slots)
        loop = lanes.step, metadata.slots, config.num_steps
        self._draw(batch, logits_RV, Root(batch.seq_lens), best, lanes.candidates.draft_prob, loop)
        expand(lanes, *(rows.unflatten(0, shape) for rows in (*best, hidden_RH)), config)


def _inverse(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """i64 [V]: the draft id of every target id, -1 for a token that cannot be drafted."""
    ids = torch.arange(len(d2t), device=d2t.device)
    return torch.full((vocab_size,), -1, device=d2t.device).index_put((ids + d2t,), ids)
