"""Decoder of a drafter with weights: its tensors and its shape, which every kind of head reads alike."""

from collections.abc import Mapping

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pool import KVBuffer, KVLayout
from specsim.core.rank_group import RankGroup
from specsim.core.rank_part import kv_layout_of
from specsim.core.target import Target
from specsim.fast.layers import Weights
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rotary import ForwardContext, inverse_frequencies, rotations
from specsim.fast.model.rows import HiddenRows, Norm, embed
from specsim.fast.targets.decoder import on_device


class DecoderHead:
    """A decoder over a target's features, without its forward; ranks share its weights where the kind allows it."""

    bonus_columns: int = 0

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        target: Target,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        self._part = None if ranks is None else ranks.part
        self._model = config.model if self._part is None else self._part.config(config.model)
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._weights = Weights(on_device(floating, device, dtype), batch_invariant=batch_invariant, ranks=ranks)
        self._inverse_D = inverse_frequencies(config.model.rope).to(device)
        d2t = tensors.get("d2t")
        self.d2t = None if d2t is None else d2t.to(device, torch.int64)
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of its KV, of this rank's heads."""
        return kv_layout_of(self._model, self._part)

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, as the first hidden state is a target feature."""
        return features_RF

    def _norm(self, name: str) -> Norm:
        return Norm(self._weights[f"{name}.weight"], self._model.rms_norm_eps)

    def _forward(self, metadata: AttentionMetadata, kv: KVBuffer, dtype: torch.dtype) -> ForwardContext:
        """Collect what all layers of one forward share."""
        angles = rotations(metadata.positions, self._inverse_D, dtype, self._model.rope.amplitude)
        return ForwardContext(angles, metadata, kv)

    def _joined(self, input_ids_R: torch.Tensor, embedding_VH: torch.Tensor, hidden_RH: torch.Tensor) -> HiddenRows:
        """Write embeddings and hidden states to one buffer for the first projection: rows [R, 2H]."""
        num_rows, width = hidden_RH.shape
        joined = hidden_RH.new_empty(num_rows, 2 * width)
        embed(input_ids_R, embedding_VH, out=joined[:, :width])
        joined[:, width:].copy_(hidden_RH)
        return HiddenRows(joined)
