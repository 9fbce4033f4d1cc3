"""A language model of its own as the drafter (arXiv 2211.17192): it reads token ids only, never the target's states.

rows `own`: draft slot p holds token p, so the root's row is the last one, and its logits give the first drafts.
`shifted`: EAGLE's rows, token p+1 in slot p at position p, as in sgl-project/sglang; the model never sees token 0.
"""

from collections.abc import Mapping

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.pair import DrafterCheckpoint
from specsim.core.pool import KVBuffer
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.targets import FAMILIES


class StandaloneHead:
    """A language model whose input ids are the target's.

    Where its own vocabulary was another one, its head has only the tokens that the target has too (d2t).
    """

    def __init__(
        self, config: StandaloneConfig, tensors: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype
    ) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._model: Target = FAMILIES[config.model.family](config.model, floating, dtype)
        self.d2t = tensors.get("d2t")
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


def make(drafter: DrafterCheckpoint[StandaloneConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a language model as the drafter of a reference engine."""
    head = StandaloneHead(drafter.config, drafter.tensors, target, on.dtype)
    return AutoregressiveDrafter(head, config, on.dtype, target.config.vocab_size)
