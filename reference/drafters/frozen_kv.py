"""Multi-token prediction on frozen KV (Gemma 4's assistants): layers with queries only, over the target's keys.

A row is pre_projection(concat(embedding, hidden)), then decoder layers, then a norm, which the head reads. Each layer
attends to columns 0..L-1 of one target layer, so drafts see no other draft, and nothing is written. All rows of a round
stand at one position, L-1 or L. The hidden state handed on is post_projection of the normed one.
"""

from collections.abc import Mapping

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.frozen_kv import FrozenKVConfig, source_layers
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import AutoregressiveInput, Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.target import HeadAttention, Target
from specsim.reference.attention import AttentionMetadata, Keys
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.reference.drafting import Lanes
from specsim.reference.layers import gated_mlp, query_attention, rms_norm


class FrozenKVHead(DecoderHead):
    """A decoder of queries only, for a target with these tensors."""

    def __init__(
        self, config: FrozenKVConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        super().__init__(config, tensors, target, dtype)
        self._sources = source_layers(config, target.config)
        self.position = config.position

    @property
    def kv_layout(self) -> None:
        """Shape of its KV: none, as it reads the target's."""
        return None

    def hand_on(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Make the hidden states that the next rows read, of the target's width."""
        return self._weights.project(hidden_RH, "post_projection")

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows over the target's KV: what the head reads, [R, H]."""
        both_RH = torch.cat([self._embedding[input_ids_R], hidden_RH], dim=-1)
        hidden_RH = self._weights.project(both_RH, "pre_projection")
        for layer in range(self._model.num_layers):
            hidden_RH = self._layer(hidden_RH, layer, metadata, kv)
        return self._norm(hidden_RH, "norm")

    def _layer(self, hidden_RH: torch.Tensor, layer: int, metadata: AttentionMetadata, kv: KVBuffer) -> torch.Tensor:
        weights = self._weights.under(f"layers.{layer}")
        projections = weights.under("self_attn")
        attention = self._model.layers[layer].attention
        assert isinstance(attention, HeadAttention)
        eps = self._model.rms_norm_eps
        normed = rms_norm(hidden_RH, weights["input_layernorm.weight"], eps)
        query = projections.project(normed, "q_proj").unflatten(-1, (-1, attention.head_dim))
        if projections.get("q_norm.weight") is not None:
            query = rms_norm(query, projections["q_norm.weight"], eps)
        attended = query_attention(
            query, self._inverse_D, self._sources[layer], kv, metadata, attention, projections.get("sinks")
        )
        hidden_RH = hidden_RH + projections.project(attended, "o_proj")
        normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
        return hidden_RH + gated_mlp(normed, weights.under("mlp"))


def prefix_metadata(batch: Batch, lens: torch.Tensor, num_rows: int, position: str, pools: KVPool) -> AttentionMetadata:
    """Make the metadata of `num_rows` rows a request that see columns 0..lens-1 and write nothing.

    position: of all these rows, `last` (lens - 1) or `next` (lens).
    """
    keys = []
    for row, length in zip(batch.req_pool_indices.tolist(), lens.tolist(), strict=True):
        columns = torch.arange(length)
        keys.append(Keys(pools.slots(row, columns), columns, torch.ones(num_rows, length, dtype=torch.bool)))
    positions = (lens - 1 if position == "last" else lens).repeat_interleave(num_rows)
    return AttentionMetadata(positions, torch.full_like(positions, -1), tuple(keys))


class FrozenKVDrafter(AutoregressiveDrafter):
    """Lanes of a head that keeps no KV, whose first drafts need one row a request."""

    _head: FrozenKVHead

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> AutoregressiveInput:
        """Draft the first round's root children from the target's last hidden state."""
        return self._start(batch, next_tokens.int(), features_RF[prefill.last_rows], batch.seq_lens, pools)

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> AutoregressiveInput:
        """Draft the next round's root children from the hidden state of the last accepted node."""
        extend = draft_extend_input
        root_lens = extend.seq_lens + extend.num_accepted_tokens
        return self._start(batch, extend.bonus_tokens, extend.hidden[extend.last_rows], root_lens, pools)

    def _start(
        self,
        batch: Batch,
        bonus_tokens: torch.Tensor,
        features_BF: torch.Tensor,
        root_lens: torch.Tensor,
        pools: KVPool,
    ) -> AutoregressiveInput:
        metadata = prefix_metadata(batch, root_lens, 1, self._head.position, pools)
        hidden_BH = self._head.forward(bonus_tokens.long(), self._head.fuse(features_BF), metadata, pools.target)
        return self._first_drafts(batch, hidden_BH, bonus_tokens, root_lens)

    def _run(self, batch: Batch, lanes: Lanes, pools: KVPool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the lanes' tokens, none of which is dropped, as they stand at the root."""
        metadata = prefix_metadata(batch, batch.seq_lens, lanes.tokens.shape[1], self._head.position, pools)
        handed_RH = self._head.hand_on(lanes.hidden.flatten(0, 1))
        return self._head.forward(lanes.tokens.flatten(), handed_RH, metadata, pools.target), None


def make(drafter: DrafterCheckpoint[FrozenKVConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make queries over frozen KV as the drafter of a reference engine."""
    head = FrozenKVHead(drafter.config, drafter.tensors, target, on.dtype)
    return FrozenKVDrafter(head, config, on.dtype, target.config.vocab_size)
