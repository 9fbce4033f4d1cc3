"""A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437): a decoder layer over token and hidden state."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pool import KVBuffer
from specsim.core.rank_group import RankGroup
from specsim.core.rank_part import kv_layout_of
from specsim.fast.layers import Weights
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rotary import Forward, inverse_frequencies, rotations
from specsim.fast.model.rows import Norm, Rows, rms_norm
from specsim.fast.targets.decoder import DecoderTarget, decoder_layer_onto, on_device


class MtpModule:
    """Module k, with both normed inputs in one buffer for eh_proj, and KV in layer k of the draft buffer."""

    d2t: torch.Tensor | None = None
    lead: int = 0

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        target: DecoderTarget,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        index: int = 0,
        ranks: RankGroup | None = None,
    ) -> None:
        part = None if ranks is None else ranks.part
        self._model = config.model if part is None else part.config(config.model)
        self._target = target
        self.vocabulary_ranks = target.ranks
        prefix = f"modules.{index}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        self._weights = Weights(on_device(own, device, dtype), batch_invariant=batch_invariant, ranks=ranks)
        self._inverse_D = inverse_frequencies(config.model.rope).to(device)
        self._index = index
        self.kv_layout = replace(kv_layout_of(self._model, part), num_layers=1)
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
        both = hidden_RH.new_empty(len(hidden_RH), 2 * self.hidden_size)
        embedded_RH, normed_RH = both.chunk(2, dim=1)
        self._target.normed_embedding(input_ids_R, self._norm("enorm"), embedded_RH)
        rms_norm(hidden_RH, *self._norm("hnorm"), out=normed_RH)
        turns = rotations(metadata.positions, self._inverse_D, hidden_RH.dtype, self._model.rope.amplitude)
        forward = Forward(turns, metadata, kv)
        projected_RH = weights.project(Rows(both), "eh_proj")
        rows = Rows(projected_RH, self._norm("input_layernorm"))
        rows, _ = decoder_layer_onto(rows, weights, self._model, self._index, forward, self._norm("norm"))
        return rows.applied()

    def _norm(self, name: str) -> Norm:
        return Norm(self._weights[f"{name}.weight"], self._model.rms_norm_eps)

    def own_logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute logits of the tokens of this rank's slice of the target's head."""
        return self._target.own_logits(hidden_RH)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden_RH)
