"""Lanes of a draft phase: the paths that the drafter extends by one token in each step."""

from dataclasses import dataclass

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Candidates


@dataclass(frozen=True, slots=True)
class Lanes:
    """State of a draft phase after I steps."""

    tokens: torch.Tensor  # i64 [B, K], each lane's last token, best lane first
    scores: torch.Tensor  # f32 [B, K]
    path: torch.Tensor  # i64 [B, K, I], lane that holds lane k's token of each step
    hidden: torch.Tensor  # [B, K, H]
    candidates: Candidates  # all proposed so far


def lane_ids(batch_size: int, k: int) -> torch.Tensor:
    """Each lane's own index, i64 [B, K, 1]."""
    return torch.arange(k)[None, :, None].expand(batch_size, k, 1)


def start_lanes(draft_input: AutoregressiveInput, config: SpecConfig) -> Lanes:
    """Begin with the root's children as lanes, each with the root's hidden state."""
    return lanes_of(draft_input.topk_index, draft_input.topk_scores, draft_input.hidden, config)


def lanes_of(tokens_BK: torch.Tensor, scores_BK: torch.Tensor, hidden_BH: torch.Tensor, config: SpecConfig) -> Lanes:
    """Begin lanes with these children of the root."""
    batch_size, k = tokens_BK.shape
    hidden_BKH = hidden_BH[:, None].expand(-1, k, -1)
    parent_list = torch.arange(-1, k if config.num_steps > 1 else 0).repeat(batch_size, 1)
    candidates = Candidates(tokens_BK, scores_BK, parent_list)
    return Lanes(tokens_BK, scores_BK, lane_ids(batch_size, k), hidden_BKH, candidates)
