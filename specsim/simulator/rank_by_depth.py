"""Acceptance by depth and a draft's rank among siblings: shares, and the tree that accepts most within lanes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
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
