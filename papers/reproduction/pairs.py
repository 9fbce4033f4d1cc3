"""Figures about trees, measured with the shipped pair: drafts of EAGLE-3 at positions of its target's own texts."""

from functools import cache

import numpy as np
import torch

from papers.reproduction.static_tree import acceptance_of, best_static_tree
from specsim.acceptance.measured_pair import read_prompts
from specsim.acceptance.recording import record
from specsim.core.config import SpecConfig
from specsim.models.load import load
from specsim.models.shipped import TINY
from specsim.simulator.acceptance import accept_length
from specsim.simulator.replay import RecordedCandidates

PROMPTS = TINY / "prompts.jsonl"
NUM_PROMPTS = 8
POSITIONS = 12  # of each prompt's continuation
TOPK, NUM_STEPS = 4, 4


def dynamic_length(nodes: int) -> float:
    """Measure the accept length of EAGLE-2's tree of a size, from every recorded position."""
    return 1 + float(_recorded().accepted(_config(nodes)).mean())


def static_length(nodes: int) -> float:
    """Compute the accept length of the best static tree of a size, for the acceptance of the same positions."""
    shares = _recorded().shares().tolist()
    return accept_length(acceptance_of(best_static_tree(shares, nodes), shares))


def dynamic_over_static(nodes: int) -> float:
    """Compute the accept length of the dynamic tree over that of the best static tree of the same size."""
    return dynamic_length(nodes) / static_length(nodes)


def static_over_chain(nodes: int) -> float:
    """Compute the accept length of the best static tree over that of the longest chain."""
    chain = _recorded().accepted(SpecConfig(1, NUM_STEPS, NUM_STEPS + 1))
    return static_length(nodes) / (1 + float(chain.mean()))


def expected_and_accepted(nodes: int) -> float:
    """Compute the correlation of OPT-Tree's E(A), the sum of the tree's scores, with the accepted drafts."""
    recorded = _recorded()
    expected = np.sort(recorded.scores, axis=1)[:, -(nodes - 1) :].sum(axis=1)
    return float(np.corrcoef(expected, recorded.accepted(_config(nodes)))[0, 1])


def _config(nodes: int) -> SpecConfig:
    return SpecConfig(TOPK, NUM_STEPS, nodes)


@cache
def _recorded() -> RecordedCandidates:
    """Record all candidates of a few held-out prompts."""
    prompts = [prompt for prompt in read_prompts(PROMPTS)[:NUM_PROMPTS] if isinstance(prompt, str)]
    return record(load("tiny"), prompts, _config(TOPK**2), POSITIONS, torch.float32)
