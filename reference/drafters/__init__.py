"""Drafters by the kind their checkpoint names."""

from specsim.core.drafter import Drafter
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafters.eagle import EagleHead
from specsim.reference.drafters.eagle3 import Eagle3Head

HEADS = {"eagle": EagleHead, "eagle3": Eagle3Head}


def make(checkpoint, target, config, dtype) -> Drafter:
    """The drafter of a specsim.core.pair.DrafterCheckpoint for a target under a SpecConfig."""
    head = HEADS[checkpoint.config.kind](checkpoint.config, checkpoint.tensors, target, dtype)
    return AutoregressiveDrafter(head, config, dtype, target.config.vocab_size)
