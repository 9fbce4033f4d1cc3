"""EAGLE-1/2 (arXiv 2401.15077): decoder layers over fc(concat(embedding, feature)), read by the target's head."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.eagle import EagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.reference.layers import gated_mlp, rms_norm
from specsim.reference.targets.decoder import attend


class EagleHead(DecoderHead):
    """EAGLE's head: layers(fc(concat(embedding of token i+1, feature of i))) predicts the feature of i+1."""

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through fc and the layers, and write their KV: hidden [R, H]."""
        embedded_RH = self._embedding[input_ids_R]
        hidden_RH = self._weights.project(torch.cat([embedded_RH, hidden_RH], dim=-1), "fc")
        for layer in range(self._model.num_layers):
            hidden_RH = self._layer(hidden_RH, layer, metadata, kv)
        return hidden_RH

    def _layer(self, hidden_RH: torch.Tensor, layer: int, metadata: AttentionMetadata, kv: KVBuffer) -> torch.Tensor:
        """Run a layer, the first without a norm before its attention."""
        weights = self._weights.under(f"layers.{layer}")
        eps = self._model.rms_norm_eps
        normed = rms_norm(hidden_RH, weights["input_layernorm.weight"], eps) if layer else hidden_RH
        attention = weights.under("self_attn")
        hidden_RH = hidden_RH + attend(normed, attention, self._model, self._inverse_D, layer, kv, metadata)
        normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
        return hidden_RH + gated_mlp(normed, weights.under("mlp"))


def make(drafter: DrafterCheckpoint[EagleConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make an EAGLE head as the drafter of a reference engine."""
    head = EagleHead(drafter.config, drafter.tensors, target, on.dtype)
    return AutoregressiveDrafter(head, config, on.dtype, target.config.vocab_size)
