"""State between rounds of drafters that finish all drafts before the draft phase, which reference and fast share."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import DraftInput


@dataclass(frozen=True, slots=True, repr=False)
class ProductInput(DraftInput):
    """All drafts of the next round, made in draft-extend or prefill; the draft phase makes the product of the depths.

    Drafts deeper than 1 follow the first lane's drafts above them, or the committed tokens alone, whatever lane they
    extend.
    """

    has_all_drafts: ClassVar[bool] = True
    # f32 [B, S, K], drafter's probability of each draft, or its logarithm under score `logprob`; at temperature 1, or
    # at the request's temperature if drafts are sampled
    topk_scores: torch.Tensor
    topk_index: torch.Tensor  # i64 [B, S, K], drafts by depth: the best ones, or one sampled draft for each lane
    hidden: torch.Tensor  # [B, S, H], hidden state of each depth: after a module's norm, before a head's
    # f32 [B, S, V], distribution of each depth's drafts, 0 at temperature 0; None where verify does not read it
    draft_prob: torch.Tensor | None = None

    @classmethod
    def zeros(cls, size: int, config: SpecConfig, hidden_size: int, dtype: torch.dtype, vocab_size: int) -> Self:
        """Make the state of `size` requests with zeros in every tensor."""
        steps = config.num_steps
        return cls(
            bonus_tokens=torch.zeros(size, dtype=torch.int32),
            topk_scores=torch.zeros(size, steps, config.topk),
            topk_index=torch.zeros(size, steps, config.topk, dtype=torch.int64),
            hidden=torch.zeros(size, steps, hidden_size, dtype=dtype),
            draft_prob=torch.zeros(size, steps, vocab_size) if config.has_draft_prob else None,
        )

    def narrowed(self, topk: int, num_steps: int) -> Self:
        """Keep the drafts of the first depths and lanes."""
        if self.topk_index.shape[1:] == (num_steps, topk):
            return self
        return replace(
            self,
            topk_scores=self.topk_scores[:, :num_steps, :topk].contiguous(),
            topk_index=self.topk_index[:, :num_steps, :topk].contiguous(),
            hidden=self.hidden[:, :num_steps].contiguous(),
            draft_prob=None if self.draft_prob is None else self.draft_prob[:, :num_steps].contiguous(),
        )
