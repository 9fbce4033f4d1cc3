"""Drafters by checkpoint kind."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import Target
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafters.eagle import EagleHead
from specsim.reference.drafters.eagle3 import Eagle3Head

HEADS = {"eagle": EagleHead, "eagle3": Eagle3Head}


def make(checkpoint: DrafterCheckpoint, target: Target, config: SpecConfig, dtype: torch.dtype) -> Drafter:
    """Make the drafter of a checkpoint."""
    head = HEADS[checkpoint.config.kind](checkpoint.config, checkpoint.tensors, target, dtype)
    return AutoregressiveDrafter(head, config, dtype, target.config.vocab_size)
