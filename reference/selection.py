"""Selection of the candidates that form the verify tree (EAGLE-2's reranking, arXiv 2406.16858)."""

import torch

from specsim.reference.sampling import topk


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Select the `count` best candidates, as ascending flat indices i64 [B, count].

    A parent scores no less than its child and precedes it. So with ties to the lower index the set is a tree.
    """
    return topk(scores, count)[1].sort(dim=-1).values


def select_explicit(parents: list[int], scores: list[float], count: int) -> list[int]:
    """Select up to `count` of one request's candidates with their ancestors, as ascending indices.

    A candidate counts the lowest score on its path. The best are selected, ties to the lower index, so that the set is
    a tree.
    """
    path_scores: list[float] = []
    for parent, score in zip(parents, scores, strict=True):
        path_scores.append(score if parent < 0 else min(score, path_scores[parent]))
    best_first = sorted(range(len(path_scores)), key=lambda index: (-path_scores[index], index))
    return sorted(best_first[:count])
