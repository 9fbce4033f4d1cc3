"""Dense pre-norm decoders, the residual added inside each norm: Llama, Mistral and Qwen3."""

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding

from specsim.fast.attention import AttentionMetadata
from specsim.fast.layers import Weights, add_rms_norm, gated_mlp, inverse_frequencies, rms_norm, self_attention
from specsim.pool import KVBuffer
from specsim.target import ModelConfig


class DenseTarget:
    """The target protocol of specsim.target over a Hugging Face checkpoint's tensors."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ):
        self.config = config
        self._weights = Weights({name: tensor.to(device, dtype) for name, tensor in tensors.items()})
        self._inverse_D = inverse_frequencies(config).to(device)

    @property
    def embedding(self) -> torch.Tensor:
        return self._weights["model.embed_tokens.weight"]

    def forward(
        self, input_ids_R: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer, feature_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_RH, eps = embedding(input_ids_R, self.embedding), self.config.rms_norm_eps
        size = self.config.hidden_size
        features_RF = hidden_RH.new_empty(len(hidden_RH), len(feature_layers) * size)
        entering = {layer: features_RF[:, i * size : (i + 1) * size] for i, layer in enumerate(feature_layers)}
        normed_RH = rms_norm(hidden_RH, self._input_norm(0), eps)
        for layer in range(self.config.num_layers):
            if layer in entering:
                entering[layer].copy_(hidden_RH)
            weights = self._weights.under(f"model.layers.{layer}")
            attended_RH = self_attention(
                normed_RH, weights.under("self_attn"), self.config, self._inverse_D, layer, kv, metadata
            )
            hidden_RH, normed_RH = add_rms_norm(hidden_RH, attended_RH, weights["post_attention_layernorm.weight"], eps)
            hidden_RH, normed_RH = add_rms_norm(
                hidden_RH, gated_mlp(normed_RH, weights.under("mlp")), self._input_norm(layer + 1), eps
            )
        return normed_RH, features_RF if feature_layers else normed_RH

    def _input_norm(self, layer: int) -> torch.Tensor:
        """The norm that a layer begins with, the final norm after the last."""
        is_layer = layer < self.config.num_layers
        return self._weights[f"model.layers.{layer}.input_layernorm.weight" if is_layer else "model.norm.weight"]

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._weights.project(hidden_RH, "lm_head")
