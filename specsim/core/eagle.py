"""Shapes of EAGLE heads: EAGLE-1/2, EAGLE-3 with the norms of EAGLE-3.1, and P-EAGLE with its state and its mask."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch

from specsim.core.drafter import DrafterConfig, Placement
from specsim.core.errors import require


@dataclass(frozen=True, slots=True)
class EagleConfig(DrafterConfig):
    """EAGLE-1/2 (arXiv 2401.15077): layers over fc of embedding and feature, read by the target's head."""

    kind: ClassVar[str] = "eagle"


@dataclass(frozen=True, slots=True)
class Eagle3Config(DrafterConfig):
    """EAGLE-3 (arXiv 2503.01840): a layer over embedding and fused features, perhaps more layers, and a head.

    The norms before fc and norm_output are those of EAGLE-3.1 (arXiv 2605.09992).
    """

    kind: ClassVar[str] = "eagle3"
    norm_before_residual: bool = False  # the residual of the layer is taken after hidden_norm
    norm_before_fc: bool = False  # the concatenated features are normed, as one vector, before fc
    fc_norm: bool = False  # every feature is normed by itself before they are concatenated for fc
    norm_output: bool = False  # the hidden state is handed on after the final norm, not before it


@dataclass(frozen=True, slots=True)
class PEagleConfig(Eagle3Config):
    """P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts every depth in one forward."""

    kind: ClassVar[str] = "p-eagle"
    mask_token_id: int = 0  # token read where none is known yet; `mask_hidden` replaces target features there

    def __post_init__(self) -> None:
        of_model = f"0 to {self.model.vocab_size - 1}, a token of the vocabulary"
        require(0 <= self.mask_token_id < self.model.vocab_size, "mask_token_id", self.mask_token_id, of_model)


class Mask(NamedTuple):
    """Input of every mask row."""

    token_id: int
    features: torch.Tensor  # [F], learned, in place of the target's

    @classmethod
    def of(cls, config: PEagleConfig, tensors: Mapping[str, torch.Tensor], on: Placement) -> Self:
        """Take the mask of a checkpoint."""
        return cls(config.mask_token_id, tensors["mask_hidden"].to(on.device, on.dtype).contiguous())
