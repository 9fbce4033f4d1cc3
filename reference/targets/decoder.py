"""Pre-norm decoders of any family, as their configs describe each layer."""

from collections.abc import Mapping

import torch

from specsim.core.pool import KVBuffer
from specsim.core.target import Experts, ForwardOutput, LatentAttention, ModelConfig
from specsim.reference.attention import AttentionMetadata
from specsim.reference.layers import Weights, gated_mlp, inverse_frequencies, rms_norm, self_attention
from specsim.reference.targets.experts import mixture
from specsim.reference.targets.latent_attention import latent_attention


def in_dtype(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Convert weights, but keep what the router adds to its scores in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: x.to(wide if name.endswith("correction_bias") else dtype) for name, x in tensors.items()}


def attend(
    x_RH: torch.Tensor,
    weights: Weights,
    config: ModelConfig,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Run a layer's attention over rows under their norm, with heads or a latent vector, and write KV: [R, H]."""
    shape = config.layers[layer].attention
    if isinstance(shape, LatentAttention):
        return latent_attention(x_RH, weights, shape, inverse_D, layer, kv, metadata)
    return self_attention(x_RH, weights, config, inverse_D, layer, kv, metadata)


def decoder_layer(
    hidden_RH: torch.Tensor,
    weights: Weights,
    config: ModelConfig,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a layer and write its KV: (hidden [R, H], experts i64 [R, K]).

    The experts of a dense layer are None.
    """
    shape = config.layers[layer]
    eps = config.rms_norm_eps
    normed = rms_norm(hidden_RH, weights["input_layernorm.weight"], eps)
    hidden_RH = hidden_RH + attend(normed, weights.under("self_attn"), config, inverse_D, layer, kv, metadata)
    normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
    if isinstance(shape.mlp, Experts):
        output_RH, chosen_RK = mixture(normed, weights.under("mlp"), shape.mlp)
        return hidden_RH + output_RH, chosen_RK
    return hidden_RH + gated_mlp(normed, weights.under("mlp")), None


class DecoderTarget:
    """A target of protocol specsim.core.target.Target, from the tensors of models/checkpoint/layout.py."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.config = config
        self._weights = Weights(in_dtype(tensors, dtype))
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
        routed = []
        for layer in range(self.config.num_layers):
            entering.append(hidden_RH)
            weights = self._weights.under(f"model.layers.{layer}")
            hidden_RH, chosen_RK = decoder_layer(hidden_RH, weights, self.config, self._inverse_D, layer, kv, metadata)
            routed += [] if chosen_RK is None else [chosen_RK]
        entering.append(hidden_RH)
        hidden_RH = rms_norm(hidden_RH, self._weights["model.norm.weight"], self.config.rms_norm_eps)
        features = torch.cat([entering[layer] for layer in feature_layers], dim=-1) if feature_layers else hidden_RH
        side = {"experts": torch.stack(routed, dim=1).to(torch.int16)} if routed else {}
        return ForwardOutput(hidden_RH, features, side)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._weights.project(hidden_RH, "lm_head")
