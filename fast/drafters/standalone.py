"""A language model of its own as the drafter (arXiv 2211.17192): it reads token ids only, never the target's states."""

from collections.abc import Mapping

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import Target
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.targets import FAMILIES


class StandaloneHead:
    """A language model whose input ids are the target's.

    Where its own vocabulary was another one, its head has only the tokens that the target has too (d2t).
    """

    def __init__(
        self, config: StandaloneConfig, tensors: Mapping[str, torch.Tensor], target: Target, on: Placement
    ) -> None:
        family = FAMILIES[config.model.family]
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._model: Target = family(config.model, floating, *on)
        d2t = tensors.get("d2t")
        self.d2t = None if d2t is None else d2t.to(on.device, torch.int64)
        self.kv_layout = config.model.kv_layout
        self.bonus_columns = 1 if config.rows == "own" else 0
        self.feature_layers = config.feature_layers
        self.hidden_size = config.model.hidden_size
        self.draft_vocab_size = config.draft_vocab_size

    def fuse(self, features_RF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged, which the model does not read."""
        return features_RF

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run tokens through the model, and write their KV: what its head reads, [R, H]."""
        return self._model.forward(input_ids_R, metadata, kv, ()).hidden

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RH)


def make(
    drafter: DrafterCheckpoint[StandaloneConfig], target: Target, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make a language model as the drafter of a fast engine."""
    head = StandaloneHead(drafter.config, drafter.tensors, target, on)
    return AutoregressiveDrafter(head, config, on.dtype, on.device, target.config.vocab_size)
