"""Dense pre-norm decoders: Llama, Mistral (sliding window) and Qwen3 (a norm on every query and key head)."""

from collections.abc import Mapping

import torch

from specsim.core.pool import KVBuffer
from specsim.core.target import ForwardOutput, ModelConfig
from specsim.reference.attention import AttentionMetadata
from specsim.reference.layers import Weights, gated_mlp, inverse_frequencies, rms_norm, self_attention


class DenseTarget:
    """A target of protocol specsim.core.target.Target, from a Hugging Face checkpoint's tensors."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.config = config
        self._weights = Weights({name: tensor.to(dtype) for name, tensor in tensors.items()})
        self._inverse_D = inverse_frequencies(config.rope)

    @property
    def embedding(self) -> torch.Tensor:
        return self._weights["model.embed_tokens.weight"]

    def forward(
        self, input_ids_R: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer, feature_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Run rows through the model and write their KV."""
        hidden_RH = self.embedding[input_ids_R]
        entering = []
        for layer in range(self.config.num_layers):
            entering.append(hidden_RH)
            hidden_RH = self._layer(hidden_RH, layer, metadata, kv)
        hidden_RH = rms_norm(hidden_RH, self._weights["model.norm.weight"], self.config.rms_norm_eps)
        features = torch.cat([entering[layer] for layer in feature_layers], dim=-1) if feature_layers else hidden_RH
        return ForwardOutput(hidden_RH, features)

    def _layer(self, hidden_RH: torch.Tensor, layer: int, metadata: AttentionMetadata, kv: KVBuffer) -> torch.Tensor:
        weights = self._weights.under(f"model.layers.{layer}")
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden_RH, weights["input_layernorm.weight"], eps)
        hidden_RH = hidden_RH + self_attention(
            normed, weights.under("self_attn"), self.config, self._inverse_D, layer, kv, metadata
        )
        normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
        return hidden_RH + gated_mlp(normed, weights.under("mlp"))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._weights.project(hidden_RH, "lm_head")
