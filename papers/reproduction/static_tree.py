"""Static trees that accept most under shares by depth and rank: Sequoia's search (arXiv 2402.12374)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsim.core.errors import InputError, require, require_int
from specsim.simulator.acceptance import PerPosition
from specsim.simulator.bounds import probability
from specsim.simulator.rank_by_depth import RankedTree, rates_by_depth


class _Table(NamedTuple):
    """Best subtrees below nodes of one depth, by number of nodes n and of their root's children b."""

    tokens: np.ndarray  # f64 [N + 1, B + 1], most expected tokens, the root's included; -inf: there is no such tree
    last: np.ndarray  # int64 [N + 1, B + 1], nodes of the last child's subtree

    @property
    def best(self) -> np.ndarray:
        """Most expected tokens of n nodes, f64 [N + 1]."""
        return self.tokens.max(axis=1)


def best_static_tree(shares: Sequence[Sequence[float]], num_draft_tokens: int) -> RankedTree:
    """Find the tree of `num_draft_tokens` nodes, root included, that accepts most drafts on average.

    Child r of a node at depth d is accepted with probability shares[d][r], given that the node is: Sequoia's positional
    acceptance, with a row for every depth. The tree is as deep and as wide as the shares allow at most. Where shares
    fall with the rank, it holds the paths with the largest products, as EAGLE-2's tree does with lanes for all of them.
    """
    rows = _checked(shares)
    require_int("num_draft_tokens", num_draft_tokens, 1)
    largest = _largest(rows, num_draft_tokens)
    allowed = f"at most {largest}, all nodes of {len(rows)} levels of {[len(row) for row in rows]} children"
    require(num_draft_tokens <= largest, "num_draft_tokens", num_draft_tokens, allowed)
    tables = [_leaves(num_draft_tokens)]
    for row in reversed(rows):
        tables.append(_level(row, tables[-1].best))
    return _built(tables[::-1], num_draft_tokens)


def acceptance_of(tree: RankedTree, shares: Sequence[Sequence[float]]) -> PerPosition:
    """Compute the acceptance of a tree by position: sums of the products of shares along its paths."""
    return PerPosition(tuple(rates_by_depth(tree, shares, max(tree.depths, default=0)).tolist()))


def _checked(shares: Sequence[Sequence[float]]) -> list[np.ndarray]:
    require(len(shares) > 0 and all(len(row) for row in shares), "shares", shares, "a row of numbers for every depth")
    rows = [np.array([probability("shares", share) for share in row]) for row in shares]
    for row in rows:
        if row.sum() > 1 + 1e-9:
            raise InputError("shares", row.tolist(), "rows that add up to at most 1: siblings are different tokens")
    return rows


def _largest(rows: Sequence[np.ndarray], enough: int) -> int:
    """Count the nodes of the complete tree, or `enough` where it has more."""
    nodes = level = 1
    for row in rows:
        level = min(level * len(row), enough)
        nodes += level
    return min(nodes, enough)


def _leaves(size: int) -> _Table:
    """Make the table of the deepest nodes, which have no children."""
    tokens = np.full((size + 1, 1), -np.inf)
    tokens[1] = 1.0
    return _Table(tokens, np.zeros((size + 1, 1), dtype=np.int64))


def _level(row: np.ndarray, below: np.ndarray) -> _Table:
    """Make the table of a depth from the best subtrees one level deeper; m nodes are the last child's."""
    size = len(below) - 1
    tokens = np.full((size + 1, len(row) + 1), -np.inf)
    last = np.zeros(tokens.shape, dtype=np.int64)
    tokens[1, 0] = 1.0
    for child, share in enumerate(row, start=1):
        subtree = np.where(below > 0, share * np.maximum(below, 0.0), -np.inf)
        for nodes in range(child + 1, size + 1):
            gained = tokens[nodes - 1 : 0 : -1, child - 1] + subtree[1:nodes]
            best = int(np.argmax(gained))
            tokens[nodes, child] = gained[best]
            last[nodes, child] = best + 1
    return _Table(tokens, last)


def _built(tables: Sequence[_Table], size: int) -> RankedTree:
    """Read the tree from the tables, parents before children."""
    parents: list[int] = []
    ranks: list[int] = []
    depths: list[int] = []
    waiting = [(0, 0, size)]  # node, its depth, and the nodes of its subtree
    while waiting:
        node, depth, nodes = waiting.pop(0)
        table = tables[depth]
        sizes: list[int] = []
        for child in range(int(table.tokens[nodes].argmax()), 0, -1):
            sizes.append(int(table.last[nodes, child]))
            nodes -= sizes[-1]
        for rank, below in enumerate(reversed(sizes)):
            parents.append(node)
            ranks.append(rank)
            depths.append(depth + 1)
            waiting.append((len(parents), depth + 1, below))
    return RankedTree(tuple(parents), tuple(ranks), tuple(depths))
