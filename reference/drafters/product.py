"""Candidates of finished drafts: all lanes of a depth have the same children."""

from dataclasses import replace

import torch

from specsim.core.config import SpecConfig
from specsim.core.mtp import MtpInput
from specsim.core.phases import Candidates
from specsim.reference.drafting import expand
from specsim.reference.lanes import lanes_of


def product(draft_input: MtpInput, config: SpecConfig) -> Candidates:
    """Lay the drafts out as candidates, without a forward: K lanes, each with the children of its depth."""
    scores_BSK = draft_input.topk_scores
    tokens_BSK = draft_input.topk_index
    lanes = lanes_of(tokens_BSK[:, 0], scores_BSK[:, 0], draft_input.hidden[:, 0], config)
    for depth in range(1, config.num_steps):
        parts = (scores_BSK[:, depth], tokens_BSK[:, depth])
        if config.is_sampled:  # each lane has one child
            scores_BKK, tokens_BKK = (part[:, :, None] for part in parts)
        else:
            scores_BKK, tokens_BKK = (part[:, None].expand(-1, config.topk, -1) for part in parts)
        lanes = expand(lanes, scores_BKK, tokens_BKK, lanes.hidden, config)
    draft_prob = draft_input.draft_prob
    if draft_prob is not None:  # one distribution for each node that has children
        deeper = draft_prob[:, 1:].repeat_interleave(config.topk, dim=1)
        draft_prob = torch.cat([draft_prob[:, :1], deeper], dim=1)
    return replace(lanes.candidates, draft_prob=draft_prob)
