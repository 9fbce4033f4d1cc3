"""EAGLE-1/2 (arXiv 2401.15077): decoder layers over fc(concat(embedding, feature)), read by the target's head."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.eagle import EagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rows import HiddenRows, Norm
from specsim.fast.targets.decoder import DecoderTarget, run_layer


class EagleHead(DecoderHead):
    """EAGLE's head, with embedding and hidden state in one buffer for fc."""

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through fc and the layers, and write their KV: hidden [R, H]."""
        joined = self._joined(input_ids_R, self._weights["embed_tokens.weight"], hidden_RH)
        forward = self._forward(metadata, kv, hidden_RH.dtype)
        hidden = HiddenRows(self._weights.project(joined, "fc"))  # the first layer has no norm before its attention
        for layer in range(self._num_layers):
            weight = self._weights.get(f"layers.{layer + 1}.input_layernorm.weight")
            following = None if weight is None else Norm(weight, self._model.rms_norm_eps)
            hidden, _ = run_layer(
                hidden, self._weights.under(f"layers.{layer}"), self._model, layer, forward, following
            )
        return hidden.values


def make(
    drafter: DrafterCheckpoint[EagleConfig], target: DecoderTarget, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make an EAGLE head as the drafter of a fast engine."""
    head = EagleHead(drafter.config, drafter.tensors_on(on.ranks), target, on)
    return AutoregressiveDrafter(head, config, on.dtype, on.device, target.config.vocab_size)
