"""Covering arrays: a few settings in which every pair of values of any two axes meets at least once."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Cell = dict[str, Hashable]
Item = TypeVar("Item")


def covering(items: Iterable[Item], pairs_of: Callable[[Item], Iterable[Hashable]]) -> list[Item]:
    """Choose items that together contain every pair of all items.

    The choice is greedy; among equals it takes the first. pairs_of: pairs of one item. Items without a pair are all
    chosen.
    """
    pairs = [(item, frozenset(pairs_of(item))) for item in items]
    chosen = [item for item, item_pairs in pairs if not item_pairs]
    missing = set().union(*(item_pairs for _, item_pairs in pairs))
    while missing:
        item, item_pairs = max(pairs, key=lambda entry: len(entry[1] & missing))
        chosen.append(item)
        missing -= item_pairs
    return chosen


def pairwise(axes: Mapping[str, Sequence[Hashable]], is_valid: Callable[[Cell], bool] = lambda _: True) -> list[Cell]:
    """Make cells over `axes` that contain every valid pair of values.

    Greedy and deterministic. Cells are built value by value, since the product of the axes is too large for `covering`.
    is_valid also gets incomplete cells; it has to accept those that can still become valid. Raises ValueError where a
    cell cannot be completed.
    """
    pairs = [
        pair
        for first, second in combinations(axes, 2)
        for pair in (frozenset({(first, a), (second, b)}) for a in axes[first] for b in axes[second])
        if is_valid(dict(pair))
    ]
    uncovered = dict.fromkeys(pairs)
    cells = []
    while uncovered:
        cell = _complete(dict(next(iter(uncovered))), axes, uncovered, is_valid)
        cells.append({axis: cell[axis] for axis in axes})
        for pair in combinations(cell.items(), 2):
            uncovered.pop(frozenset(pair), None)
    return cells


def _complete(
    cell: Cell, axes: Mapping[str, Sequence[Hashable]], uncovered: Mapping, is_valid: Callable[[Cell], bool]
) -> Cell:
    """Fill the missing axes one by one, each with the value that covers most uncovered pairs."""
    for axis in axes:
        if axis in cell:
            continue
        values = [value for value in axes[axis] if is_valid({**cell, axis: value})]
        if not values:
            raise ValueError(f"no valid value of {axis} completes {cell}")
        gains = [sum(frozenset({item, (axis, value)}) in uncovered for item in cell.items()) for value in values]
        cell = {**cell, axis: values[gains.index(max(gains))]}
    return cell
