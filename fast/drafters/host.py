"""Drafters that see token ids only and run on the host: n-gram, suffix, a user's own."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.phases import Batch, DraftInput, ExplicitCandidates
from specsim.core.pool import KVPool
from specsim.core.proposals import ProposalDrafter
from specsim.core.target import Target
from specsim.core.token_drafter import TokenDrafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.runtime.buffers import load


class HostDrafter(StepDrafter, ProposalDrafter):
    """A token drafter as a step drafter, whose draft phase is host code between two graphs."""

    def __init__(self, drafter: TokenDrafter, config: SpecConfig, vocab_size: int, device: torch.device) -> None:
        ProposalDrafter.__init__(self, drafter, config, vocab_size)
        self._device = device

    def buffers(self, size: int) -> CandidateBuffers:
        return CandidateBuffers(ExplicitCandidates.empty(size, self._num_candidates))

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Ask the drafter for every request's candidates."""
        return ProposalDrafter.propose(self, batch, draft_input, pools).to(self._device)

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Ask the drafter for every request's candidates, and copy them to the static buffers."""
        load(buffers.candidates, ProposalDrafter.propose(self, batch, draft_input, pools))


def make(drafter: TokenDrafter, target: Target, config: SpecConfig, on: Placement) -> StepDrafter:
    """Make a user's token drafter that of a fast engine."""
    return HostDrafter(drafter, config, target.config.vocab_size, on.device)
