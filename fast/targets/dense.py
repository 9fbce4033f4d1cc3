"""Dense pre-norm decoders, with each residual sum fused with the next norm: Llama, Mistral and Qwen3."""

from collections.abc import Mapping

import torch

from specsim.core.pool import KVBuffer
from specsim.core.target import ForwardOutput, ModelConfig
from specsim.fast.layers import Weights, gated_mlp_onto, self_attention_onto
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rotary import Forward, inverse_frequencies, rotations
from specsim.fast.model.rows import Norm, Rows, embed


class DenseTarget:
    """A target of protocol specsim.core.target.Target, from a Hugging Face checkpoint's tensors."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        self.config = config
        moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        self._weights = Weights(moved, batch_invariant=batch_invariant)
        self.embedding = self._weights["model.embed_tokens.weight"]
        self._inverse_D = inverse_frequencies(config.rope).to(device)

    def forward(
        self, input_ids_R: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer, feature_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Run rows through the model and write their KV."""
        size = self.config.hidden_size
        num_rows = len(input_ids_R)
        features_RF = self.embedding.new_empty(num_rows, len(feature_layers) * size)
        # The input of a layer is written directly to the features, where it is one.
        entering = {layer: features_RF[:, i * size : (i + 1) * size] for i, layer in enumerate(feature_layers)}
        forward = Forward(rotations(metadata.positions, self._inverse_D, self.embedding.dtype), metadata, kv)
        hidden = embed(input_ids_R, self.embedding, self._input_norm(0), out=entering.get(0))
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}"
            weights = self._weights.under(name)
            hidden = self_attention_onto(
                hidden.values,
                hidden,
                weights.under("self_attn"),
                self.config,
                layer,
                forward,
                self._norm(f"{name}.post_attention_layernorm"),
            )
            following = self._input_norm(layer + 1)
            out = entering.get(layer + 1)
            hidden = gated_mlp_onto(hidden, weights.under("mlp"), following, out)
        normed_RH = hidden.applied()
        return ForwardOutput(normed_RH, features_RF if feature_layers else normed_RH)

    def _norm(self, name: str) -> Norm:
        return Norm(self._weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _input_norm(self, layer: int) -> Norm:
        """Return the first norm of a layer, or the final norm after the last layer."""
        is_layer = layer < self.config.num_layers
        return self._norm(f"model.layers.{layer}.input_layernorm" if is_layer else "model.norm")

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._weights.project(Rows(hidden_RH), "lm_head")
