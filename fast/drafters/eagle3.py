"""EAGLE-3 (arXiv 2503.01840): a layer over concat(norm embedding, norm hidden), with a draft vocabulary.

The norms of EAGLE-3.1 (arXiv 2605.09992) are those of the reference's head.
"""

from collections.abc import Mapping

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.eagle import Eagle3Config
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.layers import gated_mlp_residual
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rotary import ForwardContext
from specsim.fast.model.rows import HiddenRows, Norm, rms_norm
from specsim.fast.targets.decoder import DecoderTarget, attention_residual, run_layer


class Eagle3Head(DecoderHead):
    """EAGLE-3's head, whose two norms write to one buffer for the projections."""

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, torch.Tensor], target: DecoderTarget, on: Placement
    ) -> None:
        super().__init__(config, tensors, target, on)
        self._config = config
        self._embedding = self._weights.get("embed_tokens.weight")  # None: the target's

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Project the concatenated features [R, F], after norms before fc, to hidden states [R, H].

        A norm of all features is part of the product, unless norms of single features come between.
        """
        config = self._config
        norm = self._norm("input_norm") if config.norm_before_fc else None
        if not config.fc_norm:
            return self._weights.project(HiddenRows(features_RF, norm), "fc")
        features_RF = HiddenRows(features_RF, norm).normed()
        normed_RF = torch.empty_like(features_RF)
        parts = zip(*(rows.split(config.target_hidden_size, dim=1) for rows in (features_RF, normed_RF)), strict=True)
        for index, (feature_RH, out_RH) in enumerate(parts):
            rms_norm(feature_RH, *self._norm(f"fc_norm.{index}"), out=out_RH)
        return self._weights.project(HiddenRows(normed_RF), "fc")

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through the layers, and write their KV: hidden [R, H]."""
        weights = self._weights.under("midlayer")
        eps = self._model.rms_norm_eps
        both = hidden_RH.new_empty(len(hidden_RH), 2 * self.hidden_size)
        embedded_RH, normed_RH = both.chunk(2, dim=1)
        self._normed_embedding(input_ids_R, Norm(weights["input_layernorm.weight"], eps), embedded_RH)
        rms_norm(hidden_RH, weights["hidden_norm.weight"], eps, out=normed_RH)
        forward = self._forward(metadata, kv, hidden_RH.dtype)
        base_RH = normed_RH if self._config.norm_before_residual else hidden_RH
        hidden = attention_residual(
            base_RH,
            HiddenRows(both),
            weights.under("self_attn"),
            self._model,
            0,
            forward,
            Norm(weights["post_attention_layernorm.weight"], eps),
        )
        hidden_RH = self._further_layers(gated_mlp_residual(hidden, weights.under("mlp"), self._input_norm(1)), forward)
        return rms_norm(hidden_RH, *self._norm("norm")) if self._config.norm_output else hidden_RH

    def _input_norm(self, layer: int) -> Norm | None:
        """Return the first norm of a further layer, None after the last layer."""
        return self._norm(f"layers.{layer}.input_layernorm") if layer < self._num_layers else None

    def _further_layers(self, rows: HiddenRows, forward: ForwardContext) -> torch.Tensor:
        """Run the layers after the first, which are plain decoder layers: hidden [R, H]."""
        for layer in range(1, self._num_layers):
            weights = self._weights.under(f"layers.{layer}")
            rows, _ = run_layer(rows, weights, self._model, layer, forward, self._input_norm(layer + 1))
        return rows.values

    def _head_rows(self, hidden_RH: torch.Tensor) -> HiddenRows:
        """Return the rows that the head reads, under the final norm unless the hidden state is after it."""
        return HiddenRows(hidden_RH, None if self._config.norm_output else self._norm("norm"))

    def _normed_embedding(self, ids_R: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        """Write the normed embeddings of tokens, those of the target where the head has none of its own."""
        if self._embedding is not None:
            rms_norm(self._embedding, *norm, out=out, ids_R=ids_R)
        else:
            self._target.normed_embedding(ids_R, norm, out)


def make(
    drafter: DrafterCheckpoint[Eagle3Config], target: DecoderTarget, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make an EAGLE-3 head as the drafter of a fast engine."""
    head = Eagle3Head(drafter.config, drafter.tensors_on(on.ranks), target, on)
    return AutoregressiveDrafter(head, config, on.dtype, on.device, target.config.vocab_size)
