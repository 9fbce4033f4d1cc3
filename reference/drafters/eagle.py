"""EAGLE-1/2 (arXiv 2401.15077): decoder layers over fc(concat(embedding, feature)), read by the target's head."""

from collections.abc import Mapping

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.eagle import EagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.layers import Weights, gated_mlp, inverse_frequencies, rms_norm, self_attention


class EagleHead:
    """EAGLE's head: layers(fc(concat(embedding of token i+1, feature of i))) predicts the feature of i+1."""

    d2t: torch.Tensor | None = None
    lead: int = 0

    def __init__(
        self, config: EagleConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        self._model = config.model
        self._target = target
        self._weights = Weights({name: tensor.to(dtype) for name, tensor in tensors.items()})
        self._inverse_D = inverse_frequencies(config.model.rope)
        self.kv_layout = config.model.kv_layout
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, as EAGLE's hidden state is a target feature."""
        return features_RF

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through fc and the layers, and write their KV: hidden [R, H]."""
        embedded_RH = self._weights["embed_tokens.weight"][input_ids_R]
        hidden_RH = self._weights.project(torch.cat([embedded_RH, hidden_RH], dim=-1), "fc")
        for layer in range(self._model.num_layers):
            hidden_RH = self._layer(hidden_RH, layer, metadata, kv)
        return hidden_RH

    def _layer(self, hidden_RH: torch.Tensor, layer: int, metadata: AttentionMetadata, kv: KVBuffer) -> torch.Tensor:
        """Run a Llama layer, the first without a norm before its attention."""
        weights = self._weights.under(f"layers.{layer}")
        eps = self._model.rms_norm_eps
        normed = rms_norm(hidden_RH, weights["input_layernorm.weight"], eps) if layer else hidden_RH
        hidden_RH = hidden_RH + self_attention(
            normed, weights.under("self_attn"), self._model, self._inverse_D, layer, kv, metadata
        )
        normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
        return hidden_RH + gated_mlp(normed, weights.under("mlp"))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden_RH)


def make(drafter: DrafterCheckpoint[EagleConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make an EAGLE head as the drafter of a reference engine."""
    head = EagleHead(drafter.config, drafter.tensors, target, on.dtype)
    return AutoregressiveDrafter(head, config, on.dtype, target.config.vocab_size)
