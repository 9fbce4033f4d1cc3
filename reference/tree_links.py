"""Depths and first-child / next-sibling arrays of a verify tree, from its parents."""

from itertools import pairwise


def depths_of(parents: list[int]) -> list[int]:
    """Count the edges from the root to each node, 0 for a dead node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """Link each node to its (first child, next sibling), siblings in ascending node index, -1 for none."""
    children = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    next_token = [own[0] if own else -1 for own in children]
    next_sibling = [-1] * len(parents)
    for own in children:
        for older, younger in pairwise(own):
            next_sibling[older] = younger
    return next_token, next_sibling
