"""Shape of an MTP drafter, and its state between rounds, which reference and fast share."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.phases import DraftInput


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


@dataclass(frozen=True, slots=True, repr=False)
class MtpInput(DraftInput):
    """All drafts of the next round, finished: module k made those of depth k+1 in draft-extend or prefill.

    Drafts deeper than 1 follow the first lane's drafts above them, whatever lane they extend.
    """

    has_all_drafts: ClassVar[bool] = True
    # f32 [B, S, K], drafter's probability of each draft, or its logarithm under score `logprob`; at temperature 1, or
    # at the request's temperature if drafts are sampled
    topk_scores: torch.Tensor
    topk_index: torch.Tensor  # i64 [B, S, K], drafts by depth: the best ones, or one sampled draft for each lane
    hidden: torch.Tensor  # [B, S, H], hidden state that each depth's drafts came from, after the module's norm
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


def check_modules(drafter: MtpConfig, config: SpecConfig, vocab_size: int) -> None:
    """Raise InputError for a setting with more steps than modules, or more lanes than tokens."""
    if config.num_steps > drafter.num_modules:
        modules = f"at most {drafter.num_modules}, the drafter's modules (one module alone makes any number of drafts)"
        raise InputError("num_steps", config.num_steps, modules)
    if config.topk > vocab_size:
        raise InputError("topk", config.topk, f"at most the vocabulary, {vocab_size}")
