"""Nodes of a verify tree from candidates with explicit parents, as many as each request has."""

from specsim.reference.tree_parents import MalformedTree


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


def check_explicit(parents: list[int], request: int) -> None:
    """Raise MalformedTree for a candidate whose parent is neither the root nor an earlier candidate."""
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise MalformedTree(f"request {request}, candidate {index}: parent {parent} is not an earlier candidate")


def explicit_parents(parents: list[int], chosen: list[int], num_nodes: int) -> list[int]:
    """Find each node's parent, -1 for the root and for dead nodes, where node j ≥ 1 is candidate chosen[j-1].

    parents: of the candidates, index of an earlier candidate, -1 for the root.
    """
    node_of = {-1: 0} | {index: node for node, index in enumerate(chosen, start=1)}
    own = [-1, *(node_of[parents[index]] for index in chosen)]
    return own + [-1] * (num_nodes - len(own))
