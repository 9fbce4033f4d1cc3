"""Covering grids: few cells in which every pair of settings of any two axes meets at least once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations

Cell = dict[str, Hashable]


def pairwise(
    axes: Mapping[str, Sequence[Hashable]], is_valid: Callable[[Cell], bool] = lambda cell: True
) -> list[Cell]:
    """Cells over `axes` that contain every valid pair of values; greedy and deterministic.

    is_valid is also asked of cells that are not complete and must accept those that can still become valid. Raises
    ValueError where a cell cannot be completed.
    """
    pairs = [
        pair
        for first, second in combinations(axes, 2)
        for pair in (frozenset({(first, a), (second, b)}) for a in axes[first] for b in axes[second])
        if is_valid(dict(pair))
    ]
    uncovered, cells = dict.fromkeys(pairs), []
    while uncovered:
        cell = _complete(dict(next(iter(uncovered))), axes, uncovered, is_valid)
        cells.append({axis: cell[axis] for axis in axes})
        for pair in _pairs(cell):
            uncovered.pop(pair, None)
    return cells


def _pairs(cell: Cell) -> list[frozenset]:
    return [frozenset(pair) for pair in combinations(cell.items(), 2)]


def _complete(
    cell: Cell, axes: Mapping[str, Sequence[Hashable]], uncovered: Mapping, is_valid: Callable[[Cell], bool]
) -> Cell:
    """Fill the missing axes one by one with the value that meets most uncovered pairs, the first of equals."""
    for axis in axes:
        if axis in cell:
            continue
        values = [value for value in axes[axis] if is_valid({**cell, axis: value})]
        if not values:
            raise ValueError(f"no valid value of {axis} completes {cell}")
        gains = [sum(frozenset({item, (axis, value)}) in uncovered for item in cell.items()) for value in values]
        cell = {**cell, axis: values[gains.index(max(gains))]}
    return cell
