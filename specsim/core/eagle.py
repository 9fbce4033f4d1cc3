"""Shapes of EAGLE heads: EAGLE-1/2, and EAGLE-3 with the norms of EAGLE-3.1."""

from dataclasses import dataclass
from typing import ClassVar

from specsim.core.drafter import DrafterConfig


@dataclass(frozen=True, slots=True)
class EagleConfig(DrafterConfig):
    """EAGLE-1/2 (arXiv 2401.15077): layers over fc of embedding and feature, read by the target's head."""

    kind: ClassVar[str] = "eagle"


@dataclass(frozen=True, slots=True)
class Eagle3Config(DrafterConfig):
    """EAGLE-3 (arXiv 2503.01840): a layer over embedding and fused features, with a head of its own.

    The norms before fc and norm_output are those of EAGLE-3.1 (arXiv 2605.09992).
    """

    kind: ClassVar[str] = "eagle3"
    norm_before_residual: bool = False  # the residual of the layer is taken after hidden_norm
    norm_before_fc: bool = False  # the concatenated features are normed, as one vector, before fc
    fc_norm: bool = False  # every feature is normed by itself before they are concatenated for fc
    norm_output: bool = False  # the hidden state is handed on after the final norm, not before it
