"""Drafters of the fast implementation, by kind."""

from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import BLOCK_KINDS
from specsim.core.errors import InputError
from specsim.core.p_eagle import Mask
from specsim.core.pair import AnyDrafter, DrafterCheckpoint, check_token_drafter
from specsim.core.rank_group import RankGroup
from specsim.core.token_drafter import NgramConfig, SuffixConfig
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter
from specsim.fast.drafters.block import BlockDrafter
from specsim.fast.drafters.dflash import DFlashHead
from specsim.fast.drafters.eagle import EagleHead
from specsim.fast.drafters.eagle3 import Eagle3Head
from specsim.fast.drafters.frozen_kv import FrozenKVDrafter, FrozenKVHead
from specsim.fast.drafters.host import HostDrafter
from specsim.fast.drafters.lookup_chain import LookupChainDrafter
from specsim.fast.drafters.mtp import MtpDrafter
from specsim.fast.drafters.mtp_module import MtpModule
from specsim.fast.drafters.ngram import Ngram
from specsim.fast.drafters.none import NoDrafter
from specsim.fast.drafters.p_eagle import PEagleDrafter
from specsim.fast.drafters.standalone import StandaloneHead
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafters.suffix import Suffix
from specsim.fast.targets.decoder import DecoderTarget

HEADS: dict[str, Any] = {
    **dict.fromkeys(BLOCK_KINDS, DFlashHead),
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "frozen-kv": FrozenKVHead,
    "mtp": MtpModule,
    "p-eagle": Eagle3Head,
    "standalone": StandaloneHead,
}
PARALLEL = {  # by kind, where ranks share the target
    "eagle": ("sharded", "replicated"),
    "eagle3": ("sharded", "replicated"),
    "mtp": ("sharded",),
    "p-eagle": ("sharded", "replicated"),
    "standalone": ("replicated",),
}
TOKEN_DRAFTERS: dict[str, Any] = {"ngram": Ngram, "suffix": Suffix}


def check_parallel(drafter: AnyDrafter | None, size: int, parallel: str) -> None:
    """Raise InputError for a drafter with weights that cannot run where ranks share its target."""
    kind = drafter.config.kind if isinstance(drafter, DrafterCheckpoint) else None
    if size == 1 or kind is None:
        return
    if kind not in PARALLEL:
        raise InputError("tensor_parallel", size, f"1 with a drafter of kind {kind}")
    if parallel not in PARALLEL[kind]:
        raise InputError("draft_parallel", parallel, f"{PARALLEL[kind][0]} with a drafter of kind {kind}")


def make(
    drafter: AnyDrafter | None,
    target: DecoderTarget,
    config: SpecConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    ranks: RankGroup | None = None,
) -> StepDrafter:
    """Make the drafter of a pair.

    ranks: share its weights; None: this rank has all of them.

    Raises InputError for a setting with drafts and a pair without a drafter.
    """
    if config.is_plain:
        return NoDrafter(device)
    if drafter is None:
        raise InputError("num_steps", config.num_steps, "0 (SpecConfig.plain()) for a pair without a drafter")
    vocab_size = target.config.vocab_size
    if isinstance(drafter, DrafterCheckpoint):
        kind = drafter.config.kind
        shared = {"ranks": ranks} if "sharded" in PARALLEL.get(kind, ()) else {}
        weights = drafter.config, drafter.tensors if ranks is None else drafter.tensors_of(ranks.part)
        if kind == "mtp" and drafter.config.num_modules > 1:
            return MtpDrafter(*weights, target, dtype, device, config, batch_invariant, **shared)
        head = HEADS[kind](*weights, target, dtype, device, batch_invariant=batch_invariant, **shared)
        if kind == "p-eagle":
            return PEagleDrafter(head, config, Mask.of(drafter, dtype, device), vocab_size)
        if isinstance(head, DFlashHead):
            return BlockDrafter(head, config, vocab_size)
        make_drafter = FrozenKVDrafter if head.kv_layout is None else AutoregressiveDrafter
        return make_drafter(head, config, dtype, device, vocab_size)
    check_token_drafter(drafter, config)
    if isinstance(drafter, NgramConfig) and config.topk == 1:
        return LookupChainDrafter(drafter, config, device)
    if isinstance(drafter, NgramConfig | SuffixConfig):
        return HostDrafter(TOKEN_DRAFTERS[drafter.kind](drafter), config, vocab_size, device)
    return HostDrafter(drafter, config, vocab_size, device)
