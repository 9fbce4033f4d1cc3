"""A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437): a decoder layer over token and hidden state."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pool import KVBuffer
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.layers import Weights, inverse_frequencies, rms_norm
from specsim.reference.targets.decoder import decoder_layer, in_dtype


class MtpModule:
    """Module k: norm(layer(eh_proj(concat(enorm(embedding), hnorm(hidden))))), read by the target's head.

    Its KV is layer k of the draft buffer. As a head, it is used once in each step, with its own output as hidden state.
    """

    d2t: torch.Tensor | None = None
    lead: int = 0

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        target: Target,
        dtype: torch.dtype,
        index: int = 0,
    ) -> None:
        self._model = config.model
        self._target = target
        self._weights = Weights(in_dtype(tensors, dtype)).under(f"modules.{index}")
        self._inverse_D = inverse_frequencies(config.model.rope)
        self._index = index
        self.kv_layout = replace(config.model.kv_layout, num_layers=1)
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, as they are the target's hidden state after its final norm."""
        return features_RF

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through the module, and write their KV: hidden after the norm, [R, H]."""
        weights = self._weights
        both = torch.cat([self._norm(self._target.embedding[input_ids_R], "enorm"), self._norm(hidden_RH, "hnorm")], -1)
        hidden_RH = weights.project(both, "eh_proj")
        hidden_RH, _ = decoder_layer(hidden_RH, weights, self._model, self._inverse_D, self._index, kv, metadata)
        return self._norm(hidden_RH, "norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self._model.rms_norm_eps)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden_RH)
