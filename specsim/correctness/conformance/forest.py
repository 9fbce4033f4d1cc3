"""Trees of a batch, and calls of verifiers on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from specsim.correctness.conformance.case import Call, arguments, integers
from specsim.correctness.conformance.pools import chosen, drafted

if TYPE_CHECKING:
    from specsim.core.rule import Tree

FLAT = [-1, 0, 0, 1, 1, 2]  # two children of the root, the first with two children, the second with one


@dataclass(frozen=True, slots=True)
class Forest:
    """One tree per request."""

    parents: list[list[int]]  # [B][N]
    tokens: list[list[int]]  # [B][N]
    most: int  # drafts that may be accepted

    @property
    def size(self) -> tuple[int, int]:
        return len(self.parents), len(self.parents[0]) if self.parents else 6

    @property
    def trees(self) -> "list[Tree]":
        """The trees in the reference's form."""
        from specsim.core.rule import Tree
        from specsim.reference.tree import links

        pairs = zip(self.parents, self.tokens, strict=True)
        return [Tree(tokens, parents, *links(parents), self.most) for parents, tokens in pairs]

    def call(self, operation: str, walked: Sequence[tuple[list[int], int]], *more: Any) -> Call:
        """Make the call of a verifier that has to find these paths and bonus tokens; more: further arguments."""
        from specsim.reference.tree import links

        batch, num_nodes = self.size
        predicts = torch.full((batch * num_nodes,), -1)
        accept_index = torch.full((batch, self.most + 1), -1)
        for request, (path, bonus) in enumerate(walked):
            first = request * num_nodes
            accept_index[request, : len(path)] = first + integers(path)
            for node, after in pairwise(path):
                predicts[first + node] = self.tokens[request][after]
            predicts[first + path[-1]] = bonus
        number = integers((len(path) - 1 for path, _ in walked), torch.int32)
        expected = {"predicts": predicts.int(), "accept_index": accept_index.int(), "accept_token_num": number}
        outputs = (torch.full_like(result, fill) for result, fill in zip(expected.values(), (-1, -1, -7), strict=True))
        all_links = [links(parents) for parents in self.parents]
        tables = (
            integers(self.tokens).view(batch, num_nodes),
            torch.arange(batch * num_nodes).view(batch, num_nodes),
            integers(first for first, _ in all_links).view(batch, num_nodes),
            integers(sibling for _, sibling in all_links).view(batch, num_nodes),
        )
        return Call(arguments(operation, *outputs, *tables, *more), expected)


def grown(batch: int, k: int, num_steps: int, num_nodes: int, most: int | None = None) -> Forest:
    """Grow trees by a draft loop; most: drafts that may be accepted, all steps unless given."""
    from specsim.reference.tree import parents_of

    draft_loop = drafted(batch, k, num_steps, seed=num_nodes)
    picked = chosen(draft_loop, num_nodes)
    rows = zip(picked.tolist(), draft_loop.parent_list.tolist(), strict=True)
    parents = [parents_of(selected, parent_list, k) for selected, parent_list in rows]
    tokens = torch.cat([torch.full((batch, 1), 5), draft_loop.tokens.gather(1, picked)], dim=1)
    return Forest(parents, tokens.tolist(), num_steps if most is None else most)
