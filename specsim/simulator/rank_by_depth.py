"""Acceptance by depth and a draft's rank among siblings: shares, and the trees that accept most under them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_int
from specsim.simulator.acceptance import PerPosition
from specsim.simulator.bounds import probability

Shares = tuple[tuple[float, ...], ...]


def checked_shares(rows: Any) -> Shares:
    """Check a row for each depth, with a probability for each rank."""
    try:
        shares = tuple(tuple(probability("shares", share) for share in row) for row in rows)
    except TypeError as error:
        raise InputError("shares", rows, "rows of numbers") from error
    require(shares and all(shares), "shares", rows, "a row for each depth, at least one, with a number for each rank")
    return shares


@check_arguments
def chain_shares(rates: Sequence[float]) -> Shares:
    """Make the shares of a chain from unconditional rates by position, for best drafts only."""
    for before, rate in pairwise((1.0, *rates)):
        if not 0 <= rate <= before:
            raise InputError("accept_rates", tuple(rates), "numbers from 0 to 1, none larger than the one before")
    return tuple((rate / before if before else 0.0,) for before, rate in pairwise((1.0, *rates)))


@dataclass(frozen=True, slots=True)
class RankedTree:
    """Nodes of a tree below its root, by node number."""

    parents: tuple[int, ...]  # node numbers, 0 the root
    ranks: tuple[int, ...]  # among siblings
    depths: tuple[int, ...]  # from 1


class _Candidate(NamedTuple):
    """A draft that a tree may hold."""

    score: float  # product of the shares along its path
    parent: int  # place of its parent among the candidates, -1 for the root
    rank: int
    depth: int


def rank_by_depth(shares: Sequence[Sequence[float]], config: SpecConfig) -> PerPosition:
    """Compute the acceptance of the best tree.

    Draft r continues d accepted ones with probability shares[d][r]. A path of some depth is accepted if the tree holds
    it. Of all trees of its size within topk lanes this one accepts most (Sequoia, arXiv 2402.12374). A drafter that
    knows more than the rank, such as its current confidence, does better.
    """
    _check(shares, config)
    return PerPosition(tuple(rates_by_depth(best_tree(shares, config), shares, config.num_steps).tolist()))


def rates_by_depth(tree: RankedTree, shares: Sequence[Sequence[float]], num_steps: int) -> np.ndarray:
    """Compute the share of rounds that accept at least 1, 2, ... drafts of a tree, f64 [num_steps]."""
    rates = np.zeros(num_steps)
    reach = [1.0]
    for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
        reach.append(reach[parent] * shares[depth - 1][rank])
        rates[depth - 1] += reach[-1]
    return np.minimum.accumulate(np.minimum(rates, 1.0))


def best_tree(shares: Sequence[Sequence[float]], config: SpecConfig) -> RankedTree:
    """Build EAGLE-2's tree (arXiv 2406.16858) with the product of the shares along a path as a node's score.

    topk lanes are expanded at every step, then the best num_draft_tokens - 1 candidates kept; ties go to the earlier.
    """
    candidates: list[_Candidate] = []
    lanes = [-1]  # places among the candidates
    for depth, row in enumerate(shares[: config.num_steps], start=1):
        start = len(candidates)
        scores = [candidates[parent].score if parent >= 0 else 1.0 for parent in lanes]
        for parent, score in zip(lanes, scores, strict=True):
            children = enumerate(row[: config.topk])
            candidates += [_Candidate(score * share, parent, rank, depth) for rank, share in children]
        lanes = _best(range(start, len(candidates)), candidates)[: config.topk]
    chosen = sorted(_best(range(len(candidates)), candidates)[: config.num_draft_tokens - 1])
    node_of = {-1: 0} | {index: node for node, index in enumerate(chosen, start=1)}
    nodes = [candidates[index] for index in chosen]
    return RankedTree(
        tuple(node_of[node.parent] for node in nodes),
        tuple(node.rank for node in nodes),
        tuple(node.depth for node in nodes),
    )


def _best(indices: Iterable[int], candidates: Sequence[_Candidate]) -> list[int]:
    return sorted(indices, key=lambda index: -candidates[index].score)


def _check(shares: Sequence[Sequence[float]], config: SpecConfig) -> None:
    if len(shares) < config.num_steps or any(len(row) < config.topk for row in shares):
        raise InputError("shares", shares, f"num_steps rows of topk numbers, {config.num_steps} of {config.topk}")
    for row in shares:
        if sum(probability("shares", share) for share in row) > 1 + 1e-9:
            raise InputError("shares", row, "rows that add up to at most 1: siblings are different tokens")


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
