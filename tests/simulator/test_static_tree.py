from itertools import combinations

import numpy as np
import pytest

from papers.reproduction.static_tree import acceptance_of, best_static_tree
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import accept_length
from specsim.simulator.rank_by_depth import best_tree

FALLING = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.05), (0.6, 0.1, 0.1))
RISING = ((0.2, 0.5, 0.1), (0.1, 0.3, 0.4), (0.3, 0.3, 0.4))


def tokens_of(tree, shares):
    return accept_length(acceptance_of(tree, shares))


def trees(size, width, depth):
    """List all trees of a size as sets of paths.

    Child r of a node comes with children 0 to r - 1.
    """
    paths = [()]
    for _ in range(depth):
        paths += [(*path, rank) for path in paths for rank in range(width) if (*path, rank) not in paths]
    below = sorted(set(paths) - {()})
    for chosen in combinations(below, size - 1):
        held = {(), *chosen}
        if all(path[:-1] in held and (not path[-1] or (*path[:-1], path[-1] - 1) in held) for path in chosen):
            yield chosen


def best_by_search(size, shares):
    products = lambda path: np.prod([shares[depth][rank] for depth, rank in enumerate(path)])  # noqa: E731
    return max(1 + sum(map(products, chosen)) for chosen in trees(size, len(shares[0]), len(shares)))


@pytest.mark.parametrize("shares", [FALLING[:2], RISING[:2], [[0.3, 0.7], [0.0, 1.0], [0.6, 0.3]]])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_no_tree_of_the_size_accepts_more(shares, size):
    assert tokens_of(best_static_tree(shares, size), shares) == pytest.approx(best_by_search(size, shares), abs=1e-12)


@pytest.mark.parametrize("size", [2, 5, 9, 14])
def test_falling_shares_give_the_tree_of_largest_products(size):
    """EAGLE-2's tree with a lane for every node is this one, and Sequoia's."""
    rows = [[*row, *[0.0] * (size - 3)] for row in FALLING] if size > 3 else [list(row) for row in FALLING]
    lanes = SpecConfig(len(rows[0]), 3, size)
    assert tokens_of(best_static_tree(FALLING, size), FALLING) == pytest.approx(tokens_of(best_tree(rows, lanes), rows))


def test_lanes_cost_acceptance_where_many_paths_are_likely():
    shares = [[0.26, 0.25, 0.24, 0.23]] * 2
    two_lanes = best_tree(shares, SpecConfig(2, 2, 7))
    free = best_static_tree(shares, 7)
    assert tokens_of(free, shares) > tokens_of(two_lanes, shares) + 0.3


def test_a_tree_is_written_with_parents_first_and_ranks_in_order():
    tree = best_static_tree(RISING, 9)
    assert len(tree.parents) == 8
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True), start=1):
        assert parent < node
        assert depth == (tree.depths[parent - 1] if parent else 0) + 1
    for parent in set(tree.parents):
        ranks = [rank for other, rank in zip(tree.parents, tree.ranks, strict=True) if other == parent]
        assert ranks == list(range(len(ranks)))


def test_the_complete_tree_is_the_largest():
    assert len(best_static_tree(FALLING[:2], 13).parents) == 12
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("num_draft_tokens", 14)):
        best_static_tree(FALLING[:2], 14)


@pytest.mark.parametrize("shares", [[], [[]], [[0.6, 0.5]], [[0.5], [-0.1]]])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(InputError, check=lambda error: error.name == "shares"):
        best_static_tree(shares, 2)
