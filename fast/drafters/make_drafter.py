"""The drafter of a pair, as the record of its kind names it, and that of plain decoding."""

from typing import Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.errors import InputError
from specsim.core.pair import AnyDrafter, DrafterCheckpoint, check_drafter, record_of
from specsim.core.phases import Batch, Candidates, DraftInput
from specsim.core.pool import KVPool
from specsim.core.verifiers import resolve
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.targets.decoder import DecoderTarget


class NoDrafter(StepDrafter):
    """No drafter, which is plain decoding: rounds whose tree is its root."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffers(self, size: int) -> CandidateBuffers:
        none = torch.empty(size, 0)
        return CandidateBuffers(Candidates(none.long(), none, torch.full((size, 1), -1)))

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        pass

    def with_config(self, config: SpecConfig) -> Self:
        return self


def check_parallel(drafter: AnyDrafter | None, size: int, parallel: str) -> None:
    """Raise InputError for a drafter with weights that cannot run where ranks share its target."""
    if size == 1 or not isinstance(drafter, DrafterCheckpoint):
        return
    kind = record_of(drafter)
    if not kind.parallel:
        raise InputError("tensor_parallel", size, f"1 with a drafter of kind {kind.name}")
    if parallel not in kind.parallel:
        raise InputError("draft_parallel", parallel, f"{kind.parallel[0]} with a drafter of kind {kind.name}")


def make_drafter(drafter: AnyDrafter | None, target: DecoderTarget, config: SpecConfig, on: Placement) -> StepDrafter:
    """Make the drafter of a fast engine.

    Raises InputError for a setting with drafts and a pair without a drafter, or one that cannot draw them.
    """
    if config.is_plain:
        return NoDrafter(on.device)
    drafter = check_drafter(drafter, config)
    return resolve(record_of(drafter).fast)(drafter, target, config, on)
