"""Selection of the candidates that form the verify tree (EAGLE-2's reranking, arXiv 2406.16858)."""

import torch

from specsim.reference.sampling import topk


def select(scores: torch.Tensor, count: int, num_alive: torch.Tensor | None = None) -> torch.Tensor:
    """Select the `count` best candidates, as ascending flat indices i64 [B, count].

    A parent scores no less than its child and precedes it. So with ties to the lower index the set is a tree.
    num_alive: i32 [B], the first num_alive candidates of a request go before all others; None: there are no others.
    """
    if num_alive is not None:
        is_alive = torch.arange(scores.shape[1]) < num_alive[:, None]
        scores = torch.where(is_alive, scores, -torch.inf)
    return topk(scores, count)[1].sort(dim=-1).values


def select_explicit(parents: list[int], scores: list[float], count: int, depth_limit: int) -> list[int]:
    """Select up to `count` of one request's candidates with their ancestors, as ascending indices.

    A candidate counts the lowest score on its path. The best of depth at most depth_limit are selected, ties to the
    lower index, so that the set is a tree.
    """
    path_scores: list[float] = []
    depths: list[int] = []
    for parent, score in zip(parents, scores, strict=True):
        path_scores.append(score if parent < 0 else min(score, path_scores[parent]))
        depths.append(1 if parent < 0 else depths[parent] + 1)
    allowed = [index for index, depth in enumerate(depths) if depth <= depth_limit]
    best_first = sorted(allowed, key=lambda index: (-path_scores[index], index))
    return sorted(best_first[:count])
