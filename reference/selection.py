"""Selection of the candidates that form the verify tree (EAGLE-2's reranking, arXiv 2406.16858)."""

import torch

from specsim.reference.sampling import topk


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Select the `count` best candidates, as ascending flat indices i64 [B, count].

    A parent scores no less than its child and precedes it. So with ties to the lower index the set is a tree.
    """
    return topk(scores, count)[1].sort(dim=-1).values
