"""Shape of an MTP drafter, and its limits."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig, check_topk
from specsim.core.errors import InputError, require, require_choice


@dataclass(frozen=True, slots=True)
class MtpConfig(DrafterConfig):
    """Modules of multi-token prediction (DeepSeek-V3, arXiv 2412.19437), each of one layer of `model`."""

    kind: ClassVar[str] = "mtp"
    num_modules: int = 1  # 1: one module makes all drafts
    hidden_chain: bool = True  # module k reads the hidden state of module k-1; False: all read the target's
    # Rows that held refused drafts are written again with the true tokens, or stay as they are, which costs acceptance
    # only.
    boundary: Literal["rewrite", "stale"] = "rewrite"

    def __post_init__(self) -> None:
        require(self.num_modules >= 1, "num_modules", self.num_modules, "at least 1")
        require_choice("boundary", self.boundary, ("rewrite", "stale"))


def check_modules(drafter: MtpConfig, config: SpecConfig) -> None:
    """Raise InputError for a setting with more steps than modules, or more lanes than tokens."""
    if config.num_steps > drafter.num_modules:
        modules = f"at most {drafter.num_modules}, the drafter's modules (one module alone makes any number of drafts)"
        raise InputError("num_steps", config.num_steps, modules)
    check_topk(config, drafter.draft_vocab_size)
