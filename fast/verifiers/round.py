"""The input of a verifier."""

from dataclasses import dataclass

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import VerifyInput
from specsim.fast.verifiers.path import Limits, PathTables
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.draw import Requests
from specsim.fast.vocabulary.residual import Residuals, draw_bonus


@dataclass(frozen=True, slots=True)
class Round:
    """Trees to verify, their nodes' distributions, and the paths to write."""

    requests: Requests
    tree: VerifyInput
    distributions: Distributions
    config: SpecConfig
    accept_uniforms: torch.Tensor | None  # [B, S+1] by depth or [B, N] by node; None: drawn by their names
    final_uniforms: torch.Tensor | None  # [B]; None: drawn by their names
    paths: PathTables
    rejected_B: torch.Tensor  # i64, first of the rejected children of a path's last node, -1 for none

    @property
    def draft_prob(self) -> torch.Tensor:
        """Distribution q by parent, f32 [B, M, V], or ValueError where the tree has none."""
        if self.tree.draft_prob is None:
            raise ValueError(f"verifier {self.config.verifier!r} reads draft_prob; the tree has none")
        return self.tree.draft_prob

    @property
    def limits(self) -> Limits:
        config = self.config
        num_parents = 0 if self.tree.draft_prob is None else self.tree.draft_prob.shape[1]
        depths = self.tree.proposed_depth
        return Limits(config.num_draft_tokens, num_parents, config.num_steps, config.length_limit, depths)

    def draw_bonus(self, residuals: Residuals) -> torch.Tensor:
        """Draw the bonus tokens, i32 [B], from the residual distributions."""
        return draw_bonus(self.distributions, self.draft_prob, residuals, self.requests, self.final_uniforms)
