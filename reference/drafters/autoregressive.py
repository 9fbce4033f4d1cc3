"""Drafters that run a small decoder once a step: EAGLE, EAGLE-3. What is theirs alone is in their head."""

import torch

from specsim.config import InputError, SpecConfig
from specsim.drafter import Head
from specsim.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.pool import KVPool
from specsim.reference.attention import AttentionMetadata, extend_metadata, lane_metadata, prefill_metadata
from specsim.reference.drafting import child_scores, draft_topk, parent_ids, root_scores
from specsim.reference.extend import shift_left
from specsim.reference.kv import duplicate_tails
from specsim.reference.sampling import topk


class AutoregressiveDrafter:
    """The drafter protocol of specsim.drafter around a head."""

    def __init__(self, head: Head, config: SpecConfig, dtype: torch.dtype):
        if config.topk > head.draft_vocab_size:
            raise InputError("topk", config.topk, f"at most the draft vocabulary, {head.draft_vocab_size}")
        self._head, self._config, self._dtype = head, config, dtype
        self.kv_layout, self.feature_layers = head.kv_layout, head.feature_layers

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        ids, metadata = shift_left(prefill, next_tokens), prefill_metadata(batch, prefill, pools)
        return self._first_topk(ids, features_RF, metadata, prefill.last_rows, next_tokens.int(), pools)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        extend = draft_extend_input
        metadata = extend_metadata(batch, extend, pools)
        return self._first_topk(extend.input_ids, extend.hidden, metadata, extend.last_rows, extend.bonus_tokens, pools)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def idle(self) -> DraftInput:
        return DraftInput.empty(self._config.topk, self._head.hidden_size, self._dtype)

    def _first_topk(self, ids, features_RF, metadata, last_rows, bonus_tokens, pools) -> DraftInput:
        hidden_RH = self._head.forward(ids, self._head.fuse(features_RF), metadata, pools.draft)[last_rows]
        topk_p, topk_index = draft_topk(self._head.logits(hidden_RH), self._config.topk, self._head.d2t)
        return DraftInput(topk_p=topk_p, topk_index=topk_index, hidden=hidden_RH, bonus_tokens=bonus_tokens)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        """S-1 forwards of K lanes; after each the K best of its K² children are the next lanes, best first."""
        k, mode = self._config.topk, self._config.score
        duplicate_tails(batch, self._config, pools)
        path_BKI = torch.arange(k)[None, :, None].expand(batch.size, k, 1)
        tokens_BK, scores_BK = draft_input.topk_index, root_scores(draft_input.topk_p, mode)
        hidden_BKH = draft_input.hidden[:, None].expand(-1, k, -1)
        tokens, scores, draft_logits = [tokens_BK], [scores_BK], []
        parent_list = [torch.arange(-1, k if self._config.num_steps > 1 else 0).expand(batch.size, -1)]
        for step in range(self._config.num_steps - 1):
            metadata = lane_metadata(batch, path_BKI, self._config, pools)
            topk_p, topk_index, hidden_BKH, logits_BKV = self._step(tokens_BK, hidden_BKH, metadata, pools)
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

    def _step(self, tokens_BK, hidden_BKH, metadata: AttentionMetadata, pools: KVPool) -> tuple[torch.Tensor, ...]:
        """One draft forward: topk_p f32 and topk_index i64 [B, K, K], hidden [B, K, H], logits [B, K, draft V]."""
        hidden_RH = self._head.forward(tokens_BK.flatten(), hidden_BKH.flatten(0, 1), metadata, pools.draft)
        logits_RV = self._head.logits(hidden_RH)
        topk_p, topk_index = draft_topk(logits_RV, self._config.topk, self._head.d2t, metadata.slots)
        return tuple(rows.unflatten(0, tokens_BK.shape) for rows in (topk_p, topk_index, hidden_RH, logits_RV))

    def _reparent(self, path_BKI: torch.Tensor, parents_BK: torch.Tensor) -> torch.Tensor:
        """The lanes that hold each lane's tokens, one step on: its own (mode `lane`) or its ancestors' (`ancestor`)."""
        lanes_BK1 = torch.arange(path_BKI.shape[1])[None, :, None].expand(len(path_BKI), -1, 1)
        if self._config.draft_kv == "ancestor":
            path_BKI = path_BKI.gather(1, parents_BK[..., None].expand_as(path_BKI))
        return torch.cat([path_BKI, lanes_BK1], dim=-1)
