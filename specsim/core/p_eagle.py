"""The state that a P-EAGLE drafter keeps between rounds, and its mask, which reference and fast share."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from specsim.core.mtp import MtpInput
from specsim.core.pair import DrafterCheckpoint


class Mask(NamedTuple):
    """Input of every mask row."""

    token_id: int
    features: torch.Tensor  # [F], learned, in place of the target's

    @classmethod
    def of(cls, drafter: DrafterCheckpoint, dtype: torch.dtype, device: torch.device | None = None) -> Self:
        """Take the mask of a checkpoint."""
        return cls(drafter.config.mask_token_id, drafter.tensors["mask_hidden"].to(device, dtype).contiguous())


@dataclass(frozen=True, slots=True, repr=False)
class PEagleInput(MtpInput):
    """All drafts of the next round, which one forward made in draft-extend or prefill.

    Drafts of a depth depend on the committed tokens alone, not on the drafts above them. `hidden` is the head's state
    before its final norm, of the root's row at depth 1 and of mask rows at the depths below.
    """
