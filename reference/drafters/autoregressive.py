"""Heads that are a decoder over features of the target, and the drafter that runs one once in each step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch.nn.functional import linear

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, DrafterConfig, Head, check_topk
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, DraftExtendInput, PrefillInput
from specsim.core.pool import KVLayout, KVPool
from specsim.core.target import Target
from specsim.reference.attention import extend_metadata, lane_metadata, prefill_metadata
from specsim.reference.drafting import Lanes, Parents, RowDrafts, draft, expand, start_lanes
from specsim.reference.kv import draft_kv, draft_rows, duplicate_tails
from specsim.reference.layers import Weights, inverse_frequencies, rms_norm
from specsim.reference.targets.decoder import in_dtype


class DecoderHead:
    """A decoder over a target's features, without its forward."""

    bonus_columns: int = 0

    def __init__(
        self, config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._weights = Weights(in_dtype(floating, dtype))
        self._model = config.model
        self._target = target
        embedding = self._weights.get("embed_tokens.weight")
        self._embedding = target.embedding if embedding is None else embedding
        self._head_VH = self._weights.get("lm_head.weight")  # None: the target's
        self._inverse_D = inverse_frequencies(config.model.rope)
        self.d2t = tensors.get("d2t")
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of its KV."""
        return self._model.kv_layout

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, as the first hidden state is a target feature."""
        return features_RF

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute draft logits, [R, draft vocabulary], with a head of its own where it has one, else the target's."""
        return self._target.logits(hidden_RH) if self._head_VH is None else linear(hidden_RH, self._head_VH)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self._model.rms_norm_eps)


class AutoregressiveDrafter(Drafter):
    """A head as a drafter, for a target of `vocab_size` tokens."""

    def __init__(self, head: Head, config: SpecConfig, dtype: torch.dtype, vocab_size: int) -> None:
        check_topk(config, head.draft_vocab_size)
        self._head = head
        self._config = config
        self._dtype = dtype
        self._vocab_size = vocab_size
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers
        self.bonus_columns = head.bonus_columns

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> AutoregressiveInput:
        """Run the head over a prefill, and draft the first round's root children."""
        rows = draft_rows(prefill, next_tokens, self.bonus_columns)
        metadata = prefill_metadata(batch, rows, pools)
        hidden_RH = self._head.forward(rows.input_ids, self._head.fuse(features_RF), metadata, draft_kv(pools))
        return self._first_drafts(batch, hidden_RH[rows.last_rows], next_tokens.int(), batch.seq_lens)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AutoregressiveInput:
        """Run the head over the accepted rows, and draft the next round's root children."""
        extend = draft_extend_input
        metadata = extend_metadata(batch, extend, pools, self.bonus_columns)
        hidden_RH = self._head.forward(extend.input_ids, self._head.fuse(extend.hidden), metadata, draft_kv(pools))
        root_lens = extend.seq_lens + extend.num_accepted_tokens
        return self._first_drafts(batch, hidden_RH[extend.last_rows], extend.bonus_tokens, root_lens)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def idle(self) -> AutoregressiveInput:
        vocab_size = self._vocab_size if self._config.has_draft_prob else None
        return AutoregressiveInput.empty(self._config.topk, self._head.hidden_size, self._dtype, vocab_size)

    def with_config(self, config: SpecConfig) -> Self:
        return type(self)(self._head, config, self._dtype, self._vocab_size)

    def _first_drafts(
        self, batch: Batch, hidden_BH: torch.Tensor, bonus_tokens: torch.Tensor, root_lens: torch.Tensor
    ) -> AutoregressiveInput:
        """Draft the root's children.

        root_lens: i64 [B], L of their round.
        """
        drafts = self.drafts(batch, self._head.logits(hidden_BH), self._config.topk, root_lens, 0)
        return AutoregressiveInput(bonus_tokens, drafts.topk_scores, drafts.topk_index, hidden_BH, drafts.draft_prob)

    def drafts(
        self,
        batch: Batch,
        logits_RV: torch.Tensor,
        count: int,
        root_lens: torch.Tensor,
        depth: int,
        slots_R: torch.Tensor | None = None,
    ) -> RowDrafts:
        """Draft `count` children of every row, which is a node of that depth: the best tokens, or sampled ones.

        Every request has the same number of rows.
        """
        parents = Parents(logits_RV, root_lens, depth, slots_R)
        return draft(batch, parents, count, self._head.d2t, self._config, self._vocab_size)

    def propose(self, batch: Batch, draft_input: AutoregressiveInput, pools: KVPool) -> Candidates:
        """Run S-1 forwards of K lanes."""
        config = self._config
        duplicate_tails(batch, config, pools, self.bonus_columns)
        lanes = start_lanes(draft_input, config)
        shape = lanes.tokens.shape
        count = 1 if config.is_sampled else config.topk
        draft_logits = []
        draft_probs = [] if draft_input.draft_prob is None else [draft_input.draft_prob[:, None]]
        for step in range(1, config.num_steps):
            hidden_RH, slots_R = self._run(batch, lanes, pools)
            logits_RV = self._head.logits(hidden_RH)
            drafts = self.drafts(batch, logits_RV, count, batch.seq_lens, step, slots_R)
            topk_scores, topk_index = (rows.unflatten(0, shape) for rows in (drafts.topk_scores, drafts.topk_index))
            lanes = expand(lanes, topk_scores, topk_index, hidden_RH.unflatten(0, shape), config)
            draft_logits.append(logits_RV.unflatten(0, shape))
            if drafts.draft_prob is not None:
                draft_probs.append(drafts.draft_prob.unflatten(0, shape))
        draft_prob = torch.cat(draft_probs, dim=1) if draft_probs else None
        return replace(lanes.candidates, draft_logits=tuple(draft_logits), draft_prob=draft_prob)

    def _run(self, batch: Batch, lanes: Lanes, pools: KVPool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the lanes' tokens: (hidden [B·K, H], slots [B·K] that are -1 for dropped rows, None: no row is)."""
        metadata = lane_metadata(batch, lanes.path, self._config, pools, self.bonus_columns)
        hidden_RH = self._head.forward(lanes.tokens.flatten(), lanes.hidden.flatten(0, 1), metadata, draft_kv(pools))
        return hidden_RH, metadata.slots
