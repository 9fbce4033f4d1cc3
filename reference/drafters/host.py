"""Drafters that see token ids only and run on the host: n-gram, suffix, a user's own."""

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.proposals import ProposalDrafter
from specsim.core.target import Target
from specsim.core.token_drafter import TokenDrafter


def make(drafter: TokenDrafter, target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a user's token drafter that of a reference engine."""
    return ProposalDrafter(drafter, config, target.config.vocab_size)
