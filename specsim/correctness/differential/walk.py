"""Reported walk of the implementation under test through one request's tree."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from specsim.core.phases import VerifyOutput
from specsim.correctness.differential.distribution import RowDistribution
from specsim.correctness.differential.step import ComparedRequest

if TYPE_CHECKING:
    from specsim.core.rule import Tree


@dataclass(frozen=True, slots=True)
class ReportedWalk:
    """A path through a tree, and the token after it."""

    request: ComparedRequest[VerifyOutput]
    tree: "Tree"
    distributions: tuple[RowDistribution, ...]  # one for each node, from the logits under test
    draft_prob_MV: torch.Tensor | None  # of the implementation under test, None where the verifier reads none
    nodes: tuple[int, ...]  # from the root on
    bonus: int

    @property
    def tokens(self) -> list[int]:
        """The token after each node."""
        return [*(self.tree.tokens[node] for node in self.nodes[1:]), self.bonus]

    def children(self, depth: int) -> list[int]:
        """List the children of the path's node at a depth that may be accepted."""
        return list(self.tree.children(self.nodes[depth])) if depth < self.tree.depth_limit else []

    def accepted(self, depth: int) -> int | None:
        return self.nodes[depth + 1] if depth + 1 < len(self.nodes) else None


def reported_walk(request: ComparedRequest[VerifyOutput], adjusted_NV: torch.Tensor) -> ReportedWalk:
    """Read the path in accept_index: from the root, child by child, within the allowed depth, then -1."""
    from specsim.reference.tree import trees

    step = request.step
    tree = trees(step.batch, step.trees.reference, step.config.length_limit)[request.index]
    accept_index = request.states.map(lambda output: output.verdict.accept_index[request.index].tolist())
    row = accept_index.fast
    first = request.nodes.start
    path = tuple(node - first for node in row if node != -1)
    steps = all(0 < b < len(tree.parents) and tree.parents[b] == a for a, b in pairwise(path))
    is_path = path[:1] == (0,) and steps and len(path) <= max(tree.depth_limit, 0) + 1
    padded = [first + node for node in path] + [-1] * (len(row) - len(path))
    request.check.require("accept_index", is_path and row == padded, accept_index.reference, row)
    output = request.states.fast
    rows = zip(output.target_logits[request.nodes], adjusted_NV, strict=True)
    sampling = request.batch.sampling
    distributions = tuple(RowDistribution.of_own_logits(*row, sampling) for row in rows)
    draft_prob = request.of(step.trees).field("draft_prob").fast
    draft_prob_MV = None if draft_prob is None else draft_prob.cpu()
    bonus = int(output.verdict.predict[request.nodes][path[-1]])
    return ReportedWalk(request, tree, distributions, draft_prob_MV, path, bonus)
