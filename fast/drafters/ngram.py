"""N-gram drafts from structures that grow with each request; the reference defines chain and tree."""

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import count
from operator import attrgetter

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.target import Target
from specsim.core.token_drafter import NgramConfig, Proposal, TreeLimits
from specsim.fast.drafters.counted_trie import CountedTrie, Path, RequestTexts
from specsim.fast.drafters.host import HostDrafter
from specsim.fast.drafters.prompt_lookup import LookupChainDrafter
from specsim.fast.drafters.steps import StepDrafter


class Ngram:
    """An n-gram drafter: a table of n-grams for chains, a trie for trees."""

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._tables = RequestTexts(lambda: _NgramTable(config))
        self._tries = RequestTexts(lambda: CountedTrie(config.trie_depth))

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        if limits.topk == 1:
            table = self._tables.follow(request_id, tokens)
            return table.continuation(min(limits.max_depth, limits.max_nodes))
        trie = self._tries.follow(request_id, tokens)
        grown = _Tree(limits)
        for n in range(min(self._config.max_ngram, len(tokens)), self._config.min_ngram - 1, -1):
            if self._config.order == "recency":
                _add_recent(grown, trie, n, self._config)
            else:
                _add_probable(grown, trie, trie.suffix(n))
        return Proposal(grown.tokens, grown.parents, grown.scores)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        self._tables.drop(request_id)
        self._tries.drop(request_id)


class _NgramTable:
    """The position behind the first occurrence of each n-gram that a token follows."""

    def __init__(self, config: NgramConfig) -> None:
        self.text: list[int] = []
        self._config = config
        self._position_behind: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        position = len(self.text)
        for n in range(self._config.min_ngram, min(self._config.max_ngram, position) + 1):
            self._position_behind.setdefault(tuple(self.text[position - n :]), position)
        self.text.append(token)

    def continuation(self, num_steps: int) -> Proposal:
        """Propose what follows the first occurrence of the longest n-gram of last tokens."""
        for n in range(min(self._config.max_ngram, len(self.text)), self._config.min_ngram - 1, -1):
            position = self._position_behind.get(tuple(self.text[-n:]))
            if position is not None:
                drafts = self.text[position : position + num_steps]
                return Proposal(drafts, list(range(-1, len(drafts) - 1)), [1.0] * len(drafts))
        return Proposal([], [], [])


class _Tree:
    """A tree that grows within its limits; lists of nodes begin with the root, node 0."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self.topk = limits.topk
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self._children: list[dict[int, int]] = [{}]
        self._depths = [0]

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == self._limits.max_nodes

    def add(self, parent: int, token: int, score: float) -> int | None:
        """Find or add a child and return its node, None where a limit leaves it out."""
        children = self._children[parent]
        if token in children:
            return children[token]
        if self.is_full or len(children) == self.topk or self._depths[parent] == self._limits.max_depth:
            return None
        node = children[token] = len(self._children)
        self._children.append({})
        self._depths.append(self._depths[parent] + 1)
        self.tokens.append(token)
        self.parents.append(parent - 1)
        self.scores.append(min(score, self.scores[parent - 1]) if parent else score)
        return node


def _add_recent(grown: _Tree, trie: CountedTrie, n: int, config: NgramConfig) -> None:
    fewest = min(config.min_breadth, grown.topk)
    widening = grown.topk - fewest
    span = config.max_ngram - config.min_ngram + 1
    waiting = deque([(0, trie.suffix(n), fewest * span + (config.max_ngram - n) * widening)])
    while waiting and not grown.is_full:
        parent, path, breadth = waiting.popleft()
        followers = heapq.nlargest(max(1, breadth // span), trie.followers(path), key=attrgetter("start"))
        for token, _, _, longer in followers:
            node = grown.add(parent, token, 1.0)
            if node is not None:
                waiting.append((node, longer, breadth - widening))


def _add_probable(grown: _Tree, trie: CountedTrie, last: Path) -> None:
    waiting: list[tuple[float, int, int, int, Path]] = []  # -probability, order of discovery, parent, token, path
    order = count()
    extended = [(0, last, 1.0)]
    while extended or (waiting and not grown.is_full):
        for node, path, prob in extended:
            best = heapq.nsmallest(grown.topk, trie.followers(path), key=attrgetter("rank"))
            total = sum(follower.occurrences for follower in best)
            for follower in best:
                child_prob = prob * (follower.occurrences / total)
                heapq.heappush(waiting, (-child_prob, next(order), node, follower.token, follower.path))
        extended = []
        if waiting:
            negative, _, parent, token, path = heapq.heappop(waiting)
            node = grown.add(parent, token, -negative)
            if node is not None:
                extended = [(node, path, -negative)]


def make(drafter: NgramConfig, target: Target, config: SpecConfig, on: Placement) -> StepDrafter:
    """Make the drafter of a fast engine: chains are looked up on the device, trees on the host."""
    if config.topk == 1:
        return LookupChainDrafter(drafter, config, on.device)
    return HostDrafter(Ngram(drafter), config, target.config.vocab_size, on.device)
