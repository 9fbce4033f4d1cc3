"""EAGLE-1/2 (arXiv 2401.15077): decoder layers over fc(concat(embedding, feature)), read by the target's head."""

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding

from specsim.drafter import DrafterConfig
from specsim.fast.attention import AttentionMetadata
from specsim.fast.layers import Weights, add, add_rms_norm, gated_mlp, inverse_frequencies, self_attention
from specsim.pool import KVBuffer
from specsim.target import Target


class EagleHead:
    """The reference's head, embedding and hidden written side by side where fc reads them."""

    d2t = None

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        target: Target,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._model, self._target = config.model, target
        self._weights = Weights({name: tensor.to(device, dtype) for name, tensor in tensors.items()})
        self._inverse_D = inverse_frequencies(config.model).to(device)
        self.kv_layout, self.feature_layers = config.model.kv_layout, config.feature_layers
        self.hidden_size, self.draft_vocab_size = config.model.hidden_size, config.draft_vocab_size

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        return features_RF

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        eps, last = self._model.rms_norm_eps, self._model.num_layers - 1
        both = hidden_RH.new_empty(len(hidden_RH), 2 * self.hidden_size)
        both[:, : self.hidden_size].copy_(embedding(input_ids_R, self._weights["embed_tokens.weight"]))
        both[:, self.hidden_size :].copy_(hidden_RH)
        # The first layer has no norm before its attention.
        hidden_RH = normed_RH = self._weights.project(both, "fc")
        for layer in range(self._model.num_layers):
            weights = self._weights.under(f"layers.{layer}")
            attended_RH = self_attention(
                normed_RH, weights.under("self_attn"), self._model, self._inverse_D, layer, kv, metadata
            )
            hidden_RH, normed_RH = add_rms_norm(hidden_RH, attended_RH, weights["post_attention_layernorm.weight"], eps)
            grown_RH = gated_mlp(normed_RH, weights.under("mlp"))
            if layer == last:
                return add(hidden_RH, grown_RH)
            input_norm = self._weights[f"layers.{layer + 1}.input_layernorm.weight"]
            hidden_RH, normed_RH = add_rms_norm(hidden_RH, grown_RH, input_norm, eps)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden_RH)
