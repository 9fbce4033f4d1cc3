"""EAGLE-3 (arXiv 2503.01840): one layer over concat(norm embedding, norm hidden), with a draft vocabulary."""

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding

from specsim.drafter import DrafterConfig
from specsim.fast.attention import AttentionMetadata
from specsim.fast.layers import Weights, add, add_rms_norm, gated_mlp, inverse_frequencies, rms_norm, self_attention
from specsim.pool import KVBuffer
from specsim.target import Target


class Eagle3Head:
    """The reference's head, both norms writing side by side where the projections read them."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        target: Target,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._config, self._model = config, config.model
        floating = {name: tensor.to(device, dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._weights, d2t = Weights(floating), tensors.get("d2t")
        self.d2t = None if d2t is None else d2t.to(device, torch.int64)
        own = self._weights.get("embed_tokens.weight")
        self._embedding = target.embedding if own is None else own
        self._inverse_D = inverse_frequencies(config.model).to(device)
        self.kv_layout, self.feature_layers = config.model.kv_layout, config.feature_layers
        self.hidden_size, self.draft_vocab_size = config.model.hidden_size, config.draft_vocab_size

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        return self._weights.project(features_RF, "fc")

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        weights, eps = self._weights.under("midlayer"), self._model.rms_norm_eps
        embedded_RH = embedding(input_ids_R, self._embedding)
        both = hidden_RH.new_empty(len(hidden_RH), 2 * self.hidden_size)
        rms_norm(embedded_RH, weights["input_layernorm.weight"], eps, out=both[:, : self.hidden_size])
        rms_norm(hidden_RH, weights["hidden_norm.weight"], eps, out=both[:, self.hidden_size :])
        residual_RH = both[:, self.hidden_size :].contiguous() if self._config.norm_before_residual else hidden_RH
        attended_RH = self_attention(both, weights.under("self_attn"), self._model, self._inverse_D, 0, kv, metadata)
        hidden_RH, normed_RH = add_rms_norm(residual_RH, attended_RH, weights["post_attention_layernorm.weight"], eps)
        return add(hidden_RH, gated_mlp(normed_RH, weights.under("mlp")))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        normed_RH = rms_norm(hidden_RH, self._weights["norm.weight"], self._model.rms_norm_eps)
        return self._weights.project(normed_RH, "lm_head")
