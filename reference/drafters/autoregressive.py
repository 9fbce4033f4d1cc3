"""Drafters that run a small decoder once in each step (EAGLE, EAGLE-3), which is their head."""

from typing import NamedTuple

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Head
from specsim.core.errors import require
from specsim.core.kv_buffer import KVBuffer
from specsim.core.phases import Batch, Candidates, DraftExtendInput, DraftInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.uniforms import draft_uniforms, gumbel_noise
from specsim.reference.attention import AttentionMetadata, extend_metadata, lane_metadata, prefill_metadata
from specsim.reference.drafting import child_scores, draft_distribution, draft_topk, parent_ids, root_scores, sampled
from specsim.reference.extend import shift_left
from specsim.reference.kv import duplicate_tails
from specsim.reference.sampling import topk


class Drafts(NamedTuple):
    """Drafts that follow R rows."""

    topk_p: torch.Tensor  # f32 [R, K]
    topk_index: torch.Tensor  # i64 [R, K], target ids
    draft_prob: torch.Tensor | None  # f32 [R, V], distribution that they were drawn from; None where verify reads none


class AutoregressiveDrafter:
    """A head as a drafter, for a target of `vocab_size` tokens."""

    def __init__(self, head: Head, config: SpecConfig, dtype: torch.dtype, vocab_size: int) -> None:
        allowed = f"at most the draft vocabulary, {head.draft_vocab_size}"
        require(config.topk <= head.draft_vocab_size, "topk", config.topk, allowed)
        self._head = head
        self._config = config
        self._dtype = dtype
        self._vocab_size = vocab_size
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        metadata = prefill_metadata(batch, prefill, pools)
        ids_R = shift_left(prefill, next_tokens)
        hidden_RH = self._head.forward(ids_R, self._head.fuse(features_RF), metadata, _kv(pools))
        return self._first_drafts(batch, hidden_RH[prefill.last_rows], next_tokens.int(), batch.seq_lens)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        extend = draft_extend_input
        metadata = extend_metadata(batch, extend, pools)
        hidden_RH = self._head.forward(extend.input_ids, self._head.fuse(extend.hidden), metadata, _kv(pools))
        root_lens = extend.seq_lens + extend.num_accepted_tokens
        return self._first_drafts(batch, hidden_RH[extend.last_rows], extend.bonus_tokens, root_lens)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def idle(self) -> DraftInput:
        vocab_size = self._vocab_size if self._config.has_draft_prob else None
        return DraftInput.empty(self._config.topk, self._head.hidden_size, self._dtype, vocab_size)

    def _first_drafts(
        self, batch: Batch, hidden_BH: torch.Tensor, bonus_tokens: torch.Tensor, root_lens: torch.Tensor
    ) -> DraftInput:
        """Draft the root's children; root_lens: i64 [B], L of their round."""
        drafts = self._drafts(batch, self._head.logits(hidden_BH), self._config.topk, root_lens, 0)
        return DraftInput(drafts.topk_p, drafts.topk_index, hidden_BH, bonus_tokens, drafts.draft_prob)

    def _drafts(
        self,
        batch: Batch,
        logits_RV: torch.Tensor,
        count: int,
        root_lens: torch.Tensor,
        depth: int,
        slots_R: torch.Tensor | None = None,
    ) -> Drafts:
        """Draft `count` children of every row, a node of that depth: the best tokens, or sampled ones.

        Requests have equally many rows.
        """
        config = self._config
        num_lanes = len(logits_RV) // batch.size if batch.size else 1
        best = draft_topk(logits_RV, count, self._head.d2t, slots_R)
        if not config.is_sampled:
            return Drafts(*best, None)
        temperature_R = batch.sampling.temperature.repeat_interleave(num_lanes)
        draft_prob_RV = draft_distribution(logits_RV, temperature_R, self._head.d2t, slots_R, self._vocab_size)
        if config.verifier == "gumbel":
            noise_RV = gumbel_noise(batch.seeds, batch.request_ids, root_lens + depth + 1, self._vocab_size)
            return Drafts(*sampled(best, draft_prob_RV, None, noise_RV), None)
        uniforms_BK = draft_uniforms(batch.seeds, batch.request_ids, root_lens, depth, config.topk)
        return Drafts(*sampled(best, draft_prob_RV, uniforms_BK.view(-1, count)), draft_prob_RV)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        duplicate_tails(batch, self._config, pools)
        propose = self._propose_lanes if self._config.is_sampled else self._propose_best
        return propose(batch, draft_input, pools)

    def _propose_best(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> Candidates:
        """Run S-1 forwards of K lanes; the K best of the K² children are the next lanes, best first."""
        k = self._config.topk
        mode = self._config.score
        path_BKI = torch.arange(k)[None, :, None].expand(batch.size, k, 1)
        tokens_BK = draft_input.topk_index
        scores_BK = root_scores(draft_input.topk_p, mode)
        hidden_BKH = _hidden(draft_input)[:, None].expand(-1, k, -1)
        tokens = [tokens_BK]
        scores = [scores_BK]
        draft_logits = []
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
        """Run S-1 forwards of K lanes; one sampled child of each lane is the next lane."""
        k = self._config.topk
        mode = self._config.score
        tokens_BK = draft_input.topk_index
        scores_BK = root_scores(draft_input.topk_p, mode)
        hidden_BKH = _hidden(draft_input)[:, None].expand(-1, k, -1)
        draft_probs = [] if draft_input.draft_prob is None else [draft_input.draft_prob[:, None]]
        tokens = [tokens_BK]
        scores = [scores_BK]
        draft_logits = []
        for step in range(self._config.num_steps - 1):
            path_BKI = torch.arange(k)[None, :, None].expand(batch.size, k, step + 1)
            metadata = lane_metadata(batch, path_BKI, self._config, pools)
            hidden_BKH, logits_BKV = self._forward(tokens_BK, hidden_BKH, metadata, pools)
            drafts = self._drafts(batch, logits_BKV.flatten(0, 1), 1, batch.seq_lens, step + 1, metadata.slots)
            scores_BK = child_scores(scores_BK, drafts.topk_p.view(-1, k, 1), mode)[..., 0]
            tokens_BK = drafts.topk_index.view(-1, k)
            tokens.append(tokens_BK)
            scores.append(scores_BK)
            draft_logits.append(logits_BKV)
            if drafts.draft_prob is not None:
                draft_probs.append(drafts.draft_prob.unflatten(0, tokens_BK.shape))
        parent_list = torch.arange(-1, self._config.num_parents - 1).expand(batch.size, -1)
        draft_prob = torch.cat(draft_probs, 1) if draft_probs else None
        return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), parent_list, tuple(draft_logits), draft_prob)

    def _forward(
        self, tokens_BK: torch.Tensor, hidden_BKH: torch.Tensor, metadata: AttentionMetadata, pools: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward of all lanes: (hidden [B, K, H], logits [B, K, draft vocabulary])."""
        hidden_RH = self._head.forward(tokens_BK.flatten(), hidden_BKH.flatten(0, 1), metadata, _kv(pools))
        shape = tokens_BK.shape
        return hidden_RH.unflatten(0, shape), self._head.logits(hidden_RH).unflatten(0, shape)

    def _reparent(self, path_BKI: torch.Tensor, parents_BK: torch.Tensor) -> torch.Tensor:
        """Lanes that hold the tokens of each next lane: its own (draft_kv `lane`) or its ancestors' (`ancestor`)."""
        lanes_BK1 = torch.arange(path_BKI.shape[1])[None, :, None].expand(len(path_BKI), -1, 1)
        if self._config.draft_kv == "ancestor":
            path_BKI = path_BKI.gather(1, parents_BK[..., None].expand_as(path_BKI))
        return torch.cat([path_BKI, lanes_BK1], dim=-1)


def _kv(pools: KVPool) -> KVBuffer:
    if pools.draft is None:
        raise ValueError("the pools have no KV buffer for the drafter: make them with this engine's make_pools")
    return pools.draft


def _hidden(draft_input: DraftInput) -> torch.Tensor:
    if draft_input.hidden is None:
        raise ValueError("the draft input has no hidden states: make it with this engine's prefill or draft_extend")
    return draft_input.hidden
