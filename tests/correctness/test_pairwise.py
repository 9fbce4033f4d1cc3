"""Covering grids, compared with the cross product."""

from itertools import combinations, product

import pytest

from specsim.correctness.pairwise import covering, pairwise

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [0, 1, 2, 3], "d": [True, False]}


def pairs(cells):
    return {frozenset(pair) for cell in cells for pair in combinations(cell.items(), 2)}


def cross(is_valid=lambda _: True):
    cells = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    return [cell for cell in cells if is_valid(cell)]


def test_every_pair_occurs_in_far_fewer_cells_than_the_cross():
    cells = pairwise(AXES)
    assert pairs(cells) == pairs(cross())
    assert len(cells) <= 16 < len(cross())


def test_invalid_combinations_are_left_out_and_all_others_occur():
    def is_valid(cell):
        return cell.get("a") != 1 or cell.get("c", 0) == 0

    cells = pairwise(AXES, is_valid)
    assert all(map(is_valid, cells))
    assert pairs(cells) == pairs(cross(is_valid))


def test_a_cell_that_cannot_be_completed_is_named():
    with pytest.raises(ValueError, match="no valid value of c completes"):
        pairwise(AXES, lambda cell: "c" not in cell or not {"a", "b"} <= cell.keys())


def test_covering_items_have_every_pair_of_all_items():
    items = cross()
    chosen = covering(items, lambda cell: combinations(sorted(cell.items()), 2))
    assert pairs(chosen) == pairs(items)
    assert len(chosen) <= 16
    assert all(cell in items for cell in chosen)


def test_items_without_a_pair_are_all_chosen():
    assert covering([3, 1, 2], lambda _: ()) == [3, 1, 2]
    assert covering([(), (1, 2), (2, 1)], lambda item: [frozenset(item)] if item else []) == [(), (1, 2)]
