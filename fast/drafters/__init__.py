"""Drafters by the kind their checkpoint names."""

from specsim.fast.drafters.autoregressive import AutoregressiveDrafter
from specsim.fast.drafters.eagle import EagleHead
from specsim.fast.drafters.eagle3 import Eagle3Head

HEADS = {"eagle": EagleHead, "eagle3": Eagle3Head}


def make(checkpoint, target, config, dtype, device, batch_invariant: bool = False) -> AutoregressiveDrafter:
    """The drafter of a specsim.core.pair.DrafterCheckpoint for a target under a SpecConfig."""
    head = HEADS[checkpoint.config.kind]
    head = head(checkpoint.config, checkpoint.tensors, target, dtype, device, batch_invariant=batch_invariant)
    return AutoregressiveDrafter(head, config, dtype, device, target.config.vocab_size)
