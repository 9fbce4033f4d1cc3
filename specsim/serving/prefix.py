"""Prefix cache: a radix tree over whole pages of committed tokens.

Draft slot p holds the KV of token p+1. So two requests share a page only if they also agree in the token after it, and
with a lookahead in as many more tokens. A node's label is the page's tokens and, with a drafter that keeps KV, these.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from specsim.core.page_pool import PagePool


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page, a child of the page before it."""

    page: int
    label: tuple[int, ...]  # token ids of the page, and with draft KV the next one and those of the lookahead
    parent: "PrefixNode | None"  # None: the root, which has no page
    used: int = 0  # last call of the tree that matched it
    children: dict[tuple[int, ...], "PrefixNode"] = field(default_factory=dict)


class PrefixTree:
    """Pages of one pool that are kept for later requests."""

    def __init__(self, pools: PagePool, lookahead: int = 0) -> None:
        self._pools = pools
        self._page_size = pools.page_size
        self._lookahead = lookahead  # of the drafter, whose last rows before a chunk's end are not final
        self._label_len = self._page_size + pools.has_draft_kv + lookahead
        self._root = PrefixNode(-1, (), None)
        self._clock = 0

    def match(self, token_ids: Sequence[int], columns: int) -> list[int]:
        """Find the pages of the longest cached prefix of these tokens, of at most `columns` columns."""
        return [node.page for node in self._walk(token_ids, columns)]

    def insert(self, token_ids: Sequence[int], columns: int, pages: Sequence[int]) -> None:
        """Keep the pages of the first `columns` columns, all committed, that the tree does not have.

        token_ids: all known tokens. A page whose next tokens are not yet known, or whose draft KV will be written
        again, is left out.
        """
        columns -= self._lookahead
        path = [self._root, *self._walk(token_ids, columns)]
        for index in range(len(path) - 1, self._whole_pages(token_ids, columns)):
            label = self._label(token_ids, index)
            node = PrefixNode(pages[index], label, path[-1], self._clock)
            path[-1].children[label] = node
            self._pools.keep([node.page])
            path.append(node)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that no request uses, and return their number.

        The least recently matched goes first, a leaf before its parent.
        """
        nodes = list(self._nodes())
        heap = [(node.used, index) for index, node in enumerate(nodes) if self._is_evictable(node)]
        heapq.heapify(heap)
        evicted = 0
        while heap and evicted < num_pages:
            _, index = heapq.heappop(heap)
            parent = self._remove(nodes[index])
            evicted += 1
            if parent is not self._root and self._is_evictable(parent):
                nodes[index] = parent
                heapq.heappush(heap, (parent.used, index))
        return evicted

    def pages_above(self, held: Collection[int]) -> set[int]:
        """Find the pages of the tree that cannot be evicted while these are in use: themselves and all above them."""
        pages: set[int] = set()
        for node in (node for node in self._nodes() if node.page in held):
            above = node
            while above is not self._root and above.page not in pages:
                pages.add(above.page)
                above = above.parent or self._root
        return pages

    def clear(self) -> None:
        """Drop all pages."""
        self._pools.drop([node.page for node in self._nodes()])
        self._root.children.clear()

    def _walk(self, token_ids: Sequence[int], columns: int) -> list[PrefixNode]:
        self._clock += 1
        path: list[PrefixNode] = []
        children = self._root.children
        for index in range(self._whole_pages(token_ids, columns)):
            node = children.get(self._label(token_ids, index))
            if node is None:
                break
            node.used = self._clock
            path.append(node)
            children = node.children
        return path

    def _whole_pages(self, token_ids: Sequence[int], columns: int) -> int:
        next_tokens = self._label_len - self._page_size
        return min(columns, len(token_ids) - next_tokens) // self._page_size

    def _label(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        first = index * self._page_size
        return tuple(token_ids[first : first + self._label_len])

    def _is_evictable(self, node: PrefixNode) -> bool:
        return not node.children and self._pools.is_idle(node.page)

    def _remove(self, node: PrefixNode) -> PrefixNode:
        """Drop a node's page, and return its parent."""
        parent = node.parent or self._root
        del parent.children[node.label]
        self._pools.drop([node.page])
        return parent

    def _nodes(self) -> Iterator[PrefixNode]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node
