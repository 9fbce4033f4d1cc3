"""EAGLE-3 (arXiv 2503.01840): a layer over concat(norm embedding, norm hidden), with a draft vocabulary.

EAGLE-3.1 (arXiv 2605.09992) adds norms, as vllm-project/vllm has them in vllm/model_executor/models/llama_eagle3.py:
input_norm over all target features as one vector (norm_before_fc), then fc_norm.i over feature i (fc_norm), both before
fc; and the next step reads the hidden state after the final norm (norm_output), which the head does not norm again.

Further layers are plain decoder layers, as in vllm-project/speculators.
"""

from collections.abc import Mapping

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.eagle import Eagle3Config
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.reference.layers import gated_mlp, rms_norm
from specsim.reference.targets.decoder import attend, decoder_layer


class Eagle3Head(DecoderHead):
    """EAGLE-3's head.

    A row's hidden state is fc(target features) where the target ran the token. Where the drafter did, it is the layer's
    output: before `norm`, or with norm_output after it.
    """

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        super().__init__(config, tensors, target, dtype)
        self._config = config

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Project the concatenated features [R, F], after norms before fc, to hidden states [R, H]."""
        config = self._config
        if config.norm_before_fc:
            features_RF = self._norm(features_RF, "input_norm")
        if config.fc_norm:
            features = features_RF.split(config.target_hidden_size, dim=-1)
            features_RF = torch.cat(
                [self._norm(feature_RH, f"fc_norm.{i}") for i, feature_RH in enumerate(features)], dim=-1
            )
        return self._weights.project(features_RF, "fc")

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through the layers, and write their KV: hidden [R, H]."""
        weights = self._weights.under("midlayer")
        eps = self._model.rms_norm_eps
        embedded = rms_norm(self._embedding[input_ids_R], weights["input_layernorm.weight"], eps)
        normed = rms_norm(hidden_RH, weights["hidden_norm.weight"], eps)
        residual = normed if self._config.norm_before_residual else hidden_RH
        both = torch.cat([embedded, normed], dim=-1)
        hidden_RH = residual + attend(both, weights.under("self_attn"), self._model, self._inverse_D, 0, kv, metadata)
        normed = rms_norm(hidden_RH, weights["post_attention_layernorm.weight"], eps)
        hidden_RH = hidden_RH + gated_mlp(normed, weights.under("mlp"))
        for layer in range(1, self._model.num_layers):
            weights = self._weights.under(f"layers.{layer}")
            hidden_RH, _ = decoder_layer(hidden_RH, weights, self._model, self._inverse_D, layer, kv, metadata)
        return self._norm(hidden_RH, "norm") if self._config.norm_output else hidden_RH

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_RH if self._config.norm_output else self._norm(hidden_RH, "norm"))


def make(drafter: DrafterCheckpoint[Eagle3Config], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make an EAGLE-3 head as the drafter of a reference engine."""
    head = Eagle3Head(drafter.config, drafter.tensors, target, on.dtype)
    return AutoregressiveDrafter(head, config, on.dtype, target.config.vocab_size)
