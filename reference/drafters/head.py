"""Decoder of a drafter with weights: its tensors and its shape, which every kind of head reads alike."""

from collections.abc import Mapping

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pool import KVLayout
from specsim.core.target import Target
from specsim.reference.layers import Weights, inverse_frequencies, rms_norm
from specsim.reference.targets.decoder import in_dtype


class DecoderHead:
    """A decoder over a target's features, without its forward."""

    bonus_columns: int = 0

    def __init__(
        self, config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._weights = Weights(in_dtype(floating, dtype))
        self._model = config.model
        self._target = target
        embedding = self._weights.get("embed_tokens.weight")
        self._embedding = target.embedding if embedding is None else embedding
        self._inverse_D = inverse_frequencies(config.model.rope)
        self.d2t = tensors.get("d2t")
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of its KV."""
        return self._model.kv_layout

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, as the first hidden state is a target feature."""
        return features_RF

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute draft logits, [R, draft vocabulary], with a head of its own where it has one, else the target's."""
        has_head = self._weights.get("lm_head.weight") is not None
        return self._weights.project(hidden_RH, "lm_head") if has_head else self._target.logits(hidden_RH)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self._model.rms_norm_eps)
