"""Drafters of the reference, by kind."""

from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import BLOCK_KINDS, Drafter
from specsim.core.errors import InputError
from specsim.core.p_eagle import Mask
from specsim.core.pair import AnyDrafter, DrafterCheckpoint, check_token_drafter
from specsim.core.target import Target
from specsim.core.token_drafter import NgramConfig, SuffixConfig
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafters.block import BlockDrafter
from specsim.reference.drafters.dflash import DFlashHead
from specsim.reference.drafters.eagle import EagleHead
from specsim.reference.drafters.eagle3 import Eagle3Head
from specsim.reference.drafters.frozen_kv import FrozenKVDrafter, FrozenKVHead
from specsim.reference.drafters.host import HostDrafter
from specsim.reference.drafters.mtp import MtpDrafter
from specsim.reference.drafters.mtp_module import MtpModule
from specsim.reference.drafters.ngram import Ngram
from specsim.reference.drafters.none import NoDrafter
from specsim.reference.drafters.p_eagle import PEagleDrafter
from specsim.reference.drafters.standalone import StandaloneHead
from specsim.reference.drafters.suffix import Suffix

HEADS: dict[str, Any] = {
    **dict.fromkeys(BLOCK_KINDS, DFlashHead),
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "frozen-kv": FrozenKVHead,
    "mtp": MtpModule,
    "p-eagle": Eagle3Head,
    "standalone": StandaloneHead,
}
TOKEN_DRAFTERS: dict[str, Any] = {"ngram": Ngram, "suffix": Suffix}


def make(drafter: AnyDrafter | None, target: Target, config: SpecConfig, dtype: torch.dtype) -> Drafter:
    """Make the drafter of a pair.

    Raises InputError for a setting with drafts and a pair without a drafter.
    """
    if config.is_plain:
        return NoDrafter()
    if drafter is None:
        raise InputError("num_steps", config.num_steps, "0 (SpecConfig.plain()) for a pair without a drafter")
    vocab_size = target.config.vocab_size
    if isinstance(drafter, DrafterCheckpoint):
        if drafter.config.kind == "mtp" and drafter.config.num_modules > 1:
            return MtpDrafter(drafter.config, drafter.tensors, target, dtype, config)
        head = HEADS[drafter.config.kind](drafter.config, drafter.tensors, target, dtype)
        if drafter.config.kind == "p-eagle":
            return PEagleDrafter(head, config, Mask.of(drafter, dtype), vocab_size)
        if isinstance(head, DFlashHead):
            return BlockDrafter(head, config, vocab_size)
        make_drafter = FrozenKVDrafter if head.kv_layout is None else AutoregressiveDrafter
        return make_drafter(head, config, dtype, vocab_size)
    check_token_drafter(drafter, config)
    if isinstance(drafter, NgramConfig | SuffixConfig):
        return HostDrafter(TOKEN_DRAFTERS[drafter.kind](drafter), config, vocab_size)
    return HostDrafter(drafter, config, vocab_size)
