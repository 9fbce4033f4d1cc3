"""Occurrences of a path of tokens in a list of tokens, counted by looking at every position."""

from collections.abc import Sequence


def occurrences(tokens: Sequence[int], path: Sequence[int]) -> list[int]:
    """List the positions at which the path begins, in ascending order; occurrences may overlap."""
    length = len(path)
    return [start for start in range(len(tokens) - length + 1) if list(tokens[start : start + length]) == list(path)]


def followers(tokens: Sequence[int], path: Sequence[int]) -> dict[int, list[int]]:
    """Map each token that follows the path to the positions at which the path before it begins."""
    starts_of: dict[int, list[int]] = {}
    for start in occurrences(tokens, path):
        end = start + len(path)
        if end < len(tokens):
            starts_of.setdefault(tokens[end], []).append(start)
    return starts_of
