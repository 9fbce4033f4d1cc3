"""Drafters that run a small decoder once a step: EAGLE, EAGLE-3. What is theirs alone is in their head."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Head
from specsim.core.errors import InputError
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.uniforms import draft_uniforms, gumbel_noise
from specsim.reference.attention import AttentionMetadata, extend_metadata, lane_metadata, prefill_metadata
from specsim.reference.drafting import child_scores, draft_law, draft_topk, parent_ids, root_scores, sampled
from specsim.reference.extend import shift_left
from specsim.reference.kv import duplicate_tails
from specsim.reference.sampling import topk

Drafts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class AutoregressiveDrafter:
    """The drafter protocol of specsim.core.drafter around a head, for a target of `vocab_size` tokens."""

    def __init__(self, head: Head, config: SpecConfig, dtype: torch.dtype, vocab_size: int):
        if config.topk > head.draft_vocab_size:
            raise InputError("topk", config.topk, f"at most the draft vocabulary, {head.draft_vocab_size}")
        self._head, self._config, self._dtype, self._vocab_size = head, config, dtype, vocab_size
        self.kv_layout, self.feature_layers = head.kv_layout, head.feature_layers

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        ids, metadata = shift_left(prefill, next_tokens), prefill_metadata(batch, prefill, pools)
        hidden_RH = self._head.forward(ids, self._head.fuse(features_RF), metadata, pools.draft)
        return self._first_drafts(batch, hidden_RH[prefill.last_rows], next_tokens.int(), batch.seq_lens)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        extend = draft_extend_input
        metadata, fused_RH = extend_metadata(batch, extend, pools), self._head.fuse(extend.hidden)
        hidden_RH = self._head.forward(extend.input_ids, fused_RH, metadata, pools.draft)
        root_lens = extend.seq_lens + extend.num_accepted_tokens
        return self._first_drafts(batch, hidden_RH[extend.last_rows], extend.bonus_tokens, root_lens)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def idle(self) -> DraftInput:
        vocab_size = self._vocab_size if self._config.has_draft_prob else None
        return DraftInput.empty(self._config.topk, self._head.hidden_size, self._dtype, vocab_size)

    def _first_drafts(self, batch: Batch, hidden_BH: torch.Tensor, bonus_tokens: torch.Tensor, root_lens: torch.Tensor):
        """A fresh DraftInput; root_lens: i64 [B], L of the round whose first drafts these are."""
        logits_BV = self._head.logits(hidden_BH)
        topk_p, topk_index, draft_prob = self._drafts(batch, logits_BV, self._config.topk, root_lens, 0)
        return DraftInput(topk_p, topk_index, hidden_BH, bonus_tokens, draft_prob)

    def _drafts(self, batch: Batch, logits_RV, count: int, root_lens, depth: int, slots_R=None) -> Drafts:
        """`count` drafts of every row, rows a request alike, that follow nodes of a depth: the drafter's best, or
        sampled where the verifier wants that; and the law they were drawn from, where it reads one.
        """
        config, num_lanes = self._config, len(logits_RV) // batch.size if batch.size else 1
        best = draft_topk(logits_RV, count, self._head.d2t, slots_R)
        if not config.is_sampled:
            return *best, None
        temperature_R = batch.sampling.temperature.repeat_interleave(num_lanes)
        draft_prob_RV = draft_law(logits_RV, temperature_R, self._head.d2t, slots_R, self._vocab_size)
        if config.verifier == "gumbel":
            noise_RV = gumbel_noise(batch.seeds, batch.request_ids, root_lens + depth + 1, self._vocab_size)
            return *sampled(best, draft_prob_RV, None, noise_RV), None
        uniforms_BK = draft_uniforms(batch.seeds, batch.request_ids, root_lens, depth, config.topk)
        return *sampled(best, draft_prob_RV, uniforms_BK.view(-1, count)), draft_prob_RV

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        duplicate_tails(batch, self._config, pools)
        propose = self._propose_lanes if self._config.is_sampled else self._propose_best
        return propose(batch, draft_input, pools)

    def _propose_best(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        """S-1 forwards of K lanes; after each the K best of its K² children are the next lanes, best first."""
        k, mode = self._config.topk, self._config.score
        path_BKI = torch.arange(k)[None, :, None].expand(batch.size, k, 1)
        tokens_BK, scores_BK = draft_input.topk_index, root_scores(draft_input.topk_p, mode)
        hidden_BKH = draft_input.hidden[:, None].expand(-1, k, -1)
        tokens, scores, draft_logits = [tokens_BK], [scores_BK], []
        parent_list = [torch.arange(-1, k if self._config.num_steps > 1 else 0).expand(batch.size, -1)]
        for step in range(self._config.num_steps - 1):
            metadata = lane_metadata(batch, path_BKI, self._config, pools)
            hidden_BKH, logits_BKV = self._forward(tokens_BK, hidden_BKH, metadata, pools)
            best = draft_topk(logits_BKV.flatten(0, 1), k, self._head.d2t, metadata.slots)
            topk_p, topk_index = (rows.unflatten(0, tokens_BK.shape) for rows in best)
            draft_logits.append(logits_BKV)
            children = child_scores(scores_BK, topk_p, mode).flatten(1)
            tokens.append(topk_index.flatten(1))
            scores.append(children)
            scores_BK, chosen_BK = topk(children, k)
            tokens_BK = tokens[-1].gather(1, chosen_BK)
            parents_BK = chosen_BK // k
            hidden_BKH = hidden_BKH.gather(1, parents_BK[..., None].expand_as(hidden_BKH))
            path_BKI = self._reparent(path_BKI, parents_BK)
            if step < self._config.num_steps - 2:
                parent_list.append(parent_ids(step + 1, chosen_BK, k))
        return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parent_list, 1), tuple(draft_logits))

    def _propose_lanes(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        """S-1 forwards of K lanes, after each of which every lane goes on with one sampled child of its own."""
        k, mode = self._config.topk, self._config.score
        tokens_BK, scores_BK = draft_input.topk_index, root_scores(draft_input.topk_p, mode)
        hidden_BKH = draft_input.hidden[:, None].expand(-1, k, -1)
        laws = [] if draft_input.draft_prob is None else [draft_input.draft_prob[:, None]]
        tokens, scores, draft_logits = [tokens_BK], [scores_BK], []
        for step in range(self._config.num_steps - 1):
            path_BKI = torch.arange(k)[None, :, None].expand(batch.size, k, step + 1)
            metadata = lane_metadata(batch, path_BKI, self._config, pools)
            hidden_BKH, logits_BKV = self._forward(tokens_BK, hidden_BKH, metadata, pools)
            logits_RV = logits_BKV.flatten(0, 1)
            drafts = self._drafts(batch, logits_RV, 1, batch.seq_lens, step + 1, metadata.slots)
            scores_BK = child_scores(scores_BK, drafts[0].view(-1, k, 1), mode)[..., 0]
            tokens_BK = drafts[1].view(-1, k)
            tokens.append(tokens_BK)
            scores.append(scores_BK)
            draft_logits.append(logits_BKV)
            laws += [] if drafts[2] is None else [drafts[2].unflatten(0, tokens_BK.shape)]
        parent_list = torch.arange(-1, self._config.num_parents - 1).expand(batch.size, -1)
        draft_prob = torch.cat(laws, 1) if laws else None
        return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), parent_list, tuple(draft_logits), draft_prob)

    def _forward(self, tokens_BK, hidden_BKH, metadata: AttentionMetadata, pools: KVPool):
        """One draft forward of all lanes: hidden [B, K, H], logits [B, K, draft V]."""
        hidden_RH = self._head.forward(tokens_BK.flatten(), hidden_BKH.flatten(0, 1), metadata, pools.draft)
        return tuple(rows.unflatten(0, tokens_BK.shape) for rows in (hidden_RH, self._head.logits(hidden_RH)))

    def _reparent(self, path_BKI: torch.Tensor, parents_BK: torch.Tensor) -> torch.Tensor:
        """The lanes that hold each lane's tokens, one step on: its own (mode `lane`) or its ancestors' (`ancestor`)."""
        lanes_BK1 = torch.arange(path_BKI.shape[1])[None, :, None].expand(len(path_BKI), -1, 1)
        if self._config.draft_kv == "ancestor":
            path_BKI = path_BKI.gather(1, parents_BK[..., None].expand_as(path_BKI))
        return torch.cat([path_BKI, lanes_BK1], dim=-1)
