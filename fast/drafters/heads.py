"""Drafters by checkpoint kind."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import Target
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter
from specsim.fast.drafters.eagle import EagleHead
from specsim.fast.drafters.eagle3 import Eagle3Head

HEADS = {"eagle": EagleHead, "eagle3": Eagle3Head}


def make(
    checkpoint: DrafterCheckpoint,
    target: Target,
    config: SpecConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
) -> AutoregressiveDrafter:
    """Make the drafter of a checkpoint for a target."""
    head = HEADS[checkpoint.config.kind](
        checkpoint.config, checkpoint.tensors, target, dtype, device, batch_invariant=batch_invariant
    )
    return AutoregressiveDrafter(head, config, dtype, device, target.config.vocab_size)
