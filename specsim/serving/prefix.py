"""Prefix reuse: a radix tree over whole pages of committed tokens.

Draft slot p holds the KV of token p+1, so a page is the same page for two requests only if the token after it is the
same too: edges are labelled with the page's tokens and, where there is a drafter with KV, the next one.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specsim.core.pool import KVPool


@dataclass(slots=True, eq=False)
class Node:
    """One page below its parent's. used: when it was last met, in calls of the tree."""

    page: int
    label: tuple[int, ...]
    parent: "Node | None"
    used: int = 0
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


class PrefixTree:
    """The pages that are kept in one pool for requests to come."""

    def __init__(self, pools: KVPool):
        self._pools, self._page_size = pools, pools.page_size
        self._label_len = self._page_size + (pools.draft is not None)
        self._root, self._clock = Node(-1, (), None), 0

    def match(self, token_ids: Sequence[int], columns: int) -> list[int]:
        """The pages that hold the longest prefix of these tokens, of at most `columns` columns."""
        return [node.page for node in self._walk(token_ids, columns)]

    def insert(self, token_ids: Sequence[int], columns: int, pages: Sequence[int]) -> None:
        """Keep the pages of the first `columns` columns, all committed; one that is known already is not kept twice.

        token_ids: all that are known. A page whose next token is not among them yet is left out.
        """
        path = [self._root, *self._walk(token_ids, columns)]
        for index in range(len(path) - 1, self._whole_pages(token_ids, columns)):
            label = self._label(token_ids, index)
            node = Node(pages[index], label, path[-1], self._clock)
            path[-1].children[label] = node
            self._pools.keep([node.page])
            path.append(node)

    def evict(self, num_pages: int) -> int:
        """Free that many pages that no request holds, least recently met first, leaves before their parents; returns
        how many it were.
        """
        heap = [(node.used, order, node) for order, node in enumerate(self._nodes()) if self._is_evictable(node)]
        heapq.heapify(heap)
        evicted = 0
        while heap and evicted < num_pages:
            _, order, node = heapq.heappop(heap)
            self._remove(node)
            evicted += 1
            if node.parent is not self._root and self._is_evictable(node.parent):
                heapq.heappush(heap, (node.parent.used, order, node.parent))
        return evicted

    def clear(self) -> None:
        """Keep nothing any more."""
        self._pools.drop([node.page for node in self._nodes()])
        self._root.children.clear()

    def _walk(self, token_ids: Sequence[int], columns: int) -> list[Node]:
        self._clock += 1
        path, node = [], self._root
        for index in range(self._whole_pages(token_ids, columns)):
            node = node.children.get(self._label(token_ids, index))
            if node is None:
                break
            node.used = self._clock
            path.append(node)
        return path

    def _whole_pages(self, token_ids: Sequence[int], columns: int) -> int:
        next_tokens = self._label_len - self._page_size
        return min(columns, len(token_ids) - next_tokens) // self._page_size

    def _label(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        first = index * self._page_size
        return tuple(token_ids[first : first + self._label_len])

    def _is_evictable(self, node: Node) -> bool:
        return not node.children and self._pools.is_idle(node.page)

    def _remove(self, node: Node) -> None:
        del node.parent.children[node.label]
        self._pools.drop([node.page])

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node
