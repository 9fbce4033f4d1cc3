"""EAGLE-3 (arXiv 2503.01840): one layer over concat(norm embedding, norm hidden), with a draft vocabulary."""

from collections.abc import Mapping

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pool import KVBuffer
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.layers import Weights, gated_mlp, inverse_frequencies, rms_norm, self_attention


class Eagle3Head:
    """EAGLE-3's head.

    A row's hidden state is fc(target features) where the target ran the token, and the layer's output before `norm`
    where the drafter did.
    """

    def __init__(
        self, config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._model = config.model
        floating = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._weights = Weights(floating)
        self.d2t = tensors.get("d2t")
        own = self._weights.get("embed_tokens.weight")
        self._embedding = target.embedding if own is None else own
        self._inverse_D = inverse_frequencies(config.model)
        self.kv_layout = config.model.kv_layout
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Project the concatenated features [R, F] to hidden states [R, H]."""
        return self._weights.project(features_RF, "fc")

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through the layer, and write their KV: hidden [R, H], before the final norm."""
        weights = self._weights.under("midlayer")
        eps = self._model.rms_norm_eps
        embedded = rms_norm(self._embedding[input_ids_R], weights["input_layernorm.weight"], eps)
        normed = rms_norm(hidden_RH, weights["hidden_norm.weight"], eps)
        residual = normed if self._config.norm_before_residual else hidden_RH
        both = torch.cat([embedded, normed], dim=-1)
        hidden_RH = residual + self_attention(
            both, weights.under("self_attn"), self._model, self._inverse_D, 0, kv, metadata
        )
        normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
        return hidden_RH + gated_mlp(normed, weights.under("mlp"))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._weights.project(
            rms_norm(hidden_RH, self._weights["norm.weight"], self._model.rms_norm_eps), "lm_head"
        )
