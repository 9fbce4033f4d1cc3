"""Trees under a rank-by-depth law: who is on the target's path depends on its ranks along the way, and on depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import PerPosition, check_number


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes of a tree below its root: parents (node number, 0 the root), ranks among siblings, depths from 1."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]


def rank_by_depth(shares: Sequence[Sequence[float]], config: SpecConfig) -> PerPosition:
    """The law of a tree where the target continues a path of d accepted drafts with its r-th best draft with
    probability shares[d][r].

    A path of some depth is accepted if the tree holds it. Of all trees of its size within topk lanes this one accepts
    most (Sequoia, arXiv 2402.12374); a drafter that knows more than the rank, how sure it is this time, does better.
    """
    _check(shares, config)
    rates, reach, tree = np.zeros(config.num_steps), [1.0], best_tree(shares, config)
    for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
        reach.append(reach[parent] * shares[depth - 1][rank])
        rates[depth - 1] += reach[-1]
    return PerPosition(tuple(np.minimum.accumulate(np.minimum(rates, 1.0)).tolist()))


def best_tree(shares: Sequence[Sequence[float]], config: SpecConfig) -> Tree:
    """EAGLE-2's tree (arXiv 2406.16858) where a node's score is the product of the shares along its path: topk lanes
    are expanded at every step, then the best num_draft_tokens - 1 candidates kept; ties go to the earlier.
    """
    candidates, lanes = [], [(1.0, -1)]
    for depth, row in enumerate(shares[: config.num_steps], start=1):
        children = list(enumerate(row[: config.topk]))
        level = [(score * share, parent, rank, depth) for score, parent in lanes for rank, share in children]
        best = sorted(range(len(level)), key=lambda place: -level[place][0])[: config.topk]
        lanes = [(level[place][0], len(candidates) + place) for place in best]
        candidates += level
    best = sorted(range(len(candidates)), key=lambda place: -candidates[place][0])
    kept = sorted(best[: config.num_draft_tokens - 1])
    node_of = {-1: 0} | {place: node for node, place in enumerate(kept, start=1)}
    nodes = [candidates[place] for place in kept]
    return Tree(
        tuple(node_of[parent] for _, parent, _, _ in nodes),
        tuple(rank for _, _, rank, _ in nodes),
        tuple(depth for *_, depth in nodes),
    )


def _check(shares: Sequence[Sequence[float]], config: SpecConfig) -> None:
    if len(shares) < config.num_steps or any(len(row) < config.topk for row in shares):
        raise InputError("shares", shares, f"num_steps rows of topk numbers, {config.num_steps} of {config.topk}")
    for row in shares:
        if sum(check_number("shares", share) for share in row) > 1 + 1e-9:
            raise InputError("shares", row, "rows that add up to at most 1: siblings are different tokens")
