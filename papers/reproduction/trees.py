"""Figures about the shapes of draft trees, under acceptance by position."""

from collections.abc import Sequence
from itertools import pairwise

from papers.reproduction.static_tree import acceptance_of, best_static_tree
from specsim.simulator.acceptance import accept_length, iid_of_length
from specsim.simulator.rank_by_depth import RankedTree
from specsim.simulator.record_shares import DEFAULT, ranks

FAR = 60  # levels that stand for infinitely many
# An acceptance vector in Sequoia's sense: the default shares of plans at depth 1, five ranks.
VECTOR = DEFAULT.shares[0]


def tree_speedup(
    tokens: float, depth: int, cost_ratio: float, like_tokens: float, like_depth: int, like_speedup: float
) -> float:
    """Compute Sequoia's speed-up, G / (t(n) + d·c), with t(n) from another row of trees of the same size."""
    verify = like_tokens / like_speedup - like_depth * cost_ratio
    return tokens / (verify + depth * cost_ratio)


def endless_chain() -> float:
    """Compute the tokens of a round of a chain that never ends, over Sequoia's bound 1 / (1 - p1)."""
    return _tokens(_sequences(1, FAR)) * (1 - VECTOR[0])


def endless_sequences(count: int) -> float:
    """Compute the tokens that sequences from the root add to the first of them."""
    return _tokens(_sequences(count, FAR)) - _tokens(_sequences(1, FAR))


def endless_binary_tree() -> float:
    """Compute the tokens of a binary tree that never ends, over its bound 1 / (1 - p1 - p2), in closed form."""
    best_two = sum(VECTOR[:2])
    return sum(best_two**depth for depth in range(FAR)) * (1 - best_two)


def best_over_sequences(nodes: int, count: int) -> float:
    """Compute the tokens of the best tree over those of `count` equal sequences with as many nodes."""
    best = best_static_tree([VECTOR] * FAR, nodes)
    return _tokens(best) / _tokens(_sequences(count, (nodes - 1) // count))


def best_over_bounds(nodes: int) -> float:
    """Compute the tokens of the best tree over the larger of the bounds of chains, sequences and binary trees."""
    bounds = (1 / (1 - VECTOR[0]) + 1, 1 / (1 - sum(VECTOR[:2])))
    return _tokens(best_static_tree([VECTOR] * FAR, nodes)) / max(bounds)


def least_gain_of_a_level(nodes: int) -> float:
    """Compute the least gain in expected tokens of the best tree of a size from one more level."""
    depths = range(2, len(DEFAULT.shares) + 1)
    tokens = [
        accept_length(acceptance_of(best_static_tree(DEFAULT.shares[:depth], nodes), DEFAULT.shares))
        for depth in depths
    ]
    return min(after - before for before, after in pairwise(tokens))


def heads_length(nodes: int, among_best: Sequence[Sequence[float]]) -> float:
    """Compute the accept length of the best tree of Medusa's heads, whose guesses are taken as independent.

    among_best: by head, the share of rounds in which the token is among the 1, 2, ... best guesses.
    """
    shares = [[after - before for before, after in pairwise((0.0, *row))] for row in among_best]
    return accept_length(acceptance_of(best_static_tree(shares, nodes), shares))


def tree_of_a_chain(length: float, num_drafts: int, nodes: int, depth: int) -> float:
    """Compute the accept length of the best tree, of a drafter whose chain has this accept length."""
    share = float(iid_of_length(length, num_drafts).rates()[0])
    shares = [ranks(share)] * depth
    return accept_length(acceptance_of(best_static_tree(shares, nodes), shares))


def _tokens(tree: RankedTree) -> float:
    return accept_length(acceptance_of(tree, [VECTOR] * max(tree.depths)))


def _sequences(count: int, depth: int) -> RankedTree:
    """Make a tree of sequences that part at the root; the first is that of the best drafts."""
    parents = [0 if not level else count * (level - 1) + lane + 1 for level in range(depth) for lane in range(count)]
    ranks = [lane if not level else 0 for level in range(depth) for lane in range(count)]
    return RankedTree(tuple(parents), tuple(ranks), tuple(level + 1 for level in range(depth) for _ in range(count)))
