"""The tree of one request, as verification walks it."""

from collections.abc import Iterator
from dataclasses import dataclass

from specsim.core.phases import Batch, VerifyInput


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes 0..N-1 of one request's tree, with the root first."""

    tokens: list[int]  # [N]
    parents: list[int]  # [N], -1 for the root
    next_token: list[int]  # [N], first child, -1 for none
    next_sibling: list[int]  # [N], next sibling, -1 for none
    depth_limit: int  # depth of the deepest node that may be accepted

    def children(self, node: int) -> Iterator[int]:
        """List the children of a node, in sibling order."""
        child = self.next_token[node]
        while child >= 0:
            yield child
            child = self.next_sibling[child]

    def acceptable_children(self, path: list[int]) -> Iterator[int]:
        """List the children of a path's last node that the depth limit allows."""
        return self.children(path[-1]) if len(path) <= self.depth_limit else iter(())

    def path(self, node: int) -> list[int]:
        """List the nodes from the root to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """List the tokens from the root to this node."""
        return [self.tokens[node] for node in self.path(node)]

    def chain(self) -> range:
        """List the drafts of a chain that may be accepted: the nodes of depth 1, 2, ..."""
        return range(1, max(0, min(len(self.tokens) - 1, self.depth_limit)) + 1)


def trees(batch: Batch, verify_input: VerifyInput, max_len: int) -> list[Tree]:
    """List every request's tree.

    No node at or beyond max_len may be accepted.
    """
    lists = zip(
        verify_input.draft_tokens.tolist(),
        verify_input.parents.tolist(),
        verify_input.retrieve_next_token.tolist(),
        verify_input.retrieve_next_sibling.tolist(),
        (max_len - 1 - batch.seq_lens).tolist(),
        strict=True,
    )
    return [Tree(*each) for each in lists]
