"""N-gram drafts: continuations of earlier occurrences of a request's last tokens, straight from the definition.

Only the request's own tokens count, so drafts do not depend on other requests. `chain` is prompt lookup as in vLLM.
`tree` is the trie of SGLang, restricted to one request, with every occurrence counted once.
"""

from collections import deque
from collections.abc import Sequence

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.proposals import ProposalDrafter
from specsim.core.target import Target
from specsim.core.token_drafter import NgramConfig, Proposal, TreeLimits
from specsim.reference.drafters.occurrences import followers


class Ngram:
    """An n-gram drafter, which looks through all tokens in every round."""

    def __init__(self, config: NgramConfig) -> None:
        self._config = config

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        if limits.topk == 1:
            return chain(tokens, self._config, min(limits.max_depth, limits.max_nodes))
        return tree(tokens, self._config, limits)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        pass


def chain(tokens: Sequence[int], config: NgramConfig, num_steps: int) -> Proposal:
    """Look up the longest n-gram of last tokens that occurs earlier, and propose what follows it.

    n runs from max_ngram down to min_ngram. Among the earlier occurrences of the first n that has any, the earliest
    counts. An occurrence may overlap the last tokens, and what follows may reach into them. Proposed are the num_steps
    tokens behind the occurrence, or all up to the end; nothing if no n has an earlier occurrence. Every score is 1.
    """
    tokens = list(tokens)
    for n in range(min(config.max_ngram, len(tokens) - 1), config.min_ngram - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                drafts = tokens[start + n : start + n + num_steps]
                return Proposal(drafts, list(range(-1, len(drafts) - 1)), [1.0] * len(drafts))
    return Proposal([], [], [])


def tree(tokens: Sequence[int], config: NgramConfig, limits: TreeLimits) -> Proposal:
    """Merge the continuations of the last n tokens, for n from max_ngram down to min_ngram, below one root.

    A path is a sequence of at most trie_depth tokens that occurs in the tokens; its children are the tokens that follow
    it. Each of the last n-grams is the start of paths, and their tokens behind the n-gram go into the tree in the order
    that `order` names, until it has max_nodes. Tokens that the tree already has at that place are merged. A token whose
    parent has topk children, or is at depth max_depth, is left out with all that follows it.
    """
    grown = _Tree(limits)
    for n in range(min(config.max_ngram, len(tokens)), config.min_ngram - 1, -1):
        last = list(tokens[-n:])
        if config.order == "recency":
            _add_recent(grown, tokens, last, config)
        else:
            _add_probable(grown, tokens, last, config)
    return Proposal(grown.tokens, grown.parents, grown.scores)


class _Tree:
    """A tree that grows within its limits."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self.topk = limits.topk
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []

    def add(self, parent: int, token: int, score: float) -> int | None:
        """Find or add a child and return its index, None where a limit leaves it out.

        The score of a node is that of its first path, and at most its parent's.
        """
        siblings = [index for index, sibling_parent in enumerate(self.parents) if sibling_parent == parent]
        for index in siblings:
            if self.tokens[index] == token:
                return index
        is_full = len(self.tokens) == self._limits.max_nodes or len(siblings) == self.topk
        if is_full or self._depth(parent) == self._limits.max_depth:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score if parent < 0 else min(score, self.scores[parent]))
        return len(self.tokens) - 1

    def _depth(self, node: int) -> int:
        return 0 if node < 0 else 1 + self._depth(self.parents[node])


def _children(tokens: Sequence[int], path: list[int], config: NgramConfig) -> dict[int, list[int]]:
    return followers(tokens, path) if len(path) < config.trie_depth else {}


def _add_recent(grown: _Tree, tokens: Sequence[int], last: list[int], config: NgramConfig) -> None:
    """Add paths breadth first, the child seen last before its siblings, with score 1.

    Two children of a path never have the same last position. With w = topk - min_breadth (at least 0) and
    s = max_ngram - min_ngram + 1, a node d tokens behind an n-gram has max(1, ⌊min_breadth + (max_ngram - n - d)·w/s⌋)
    children.
    """
    fewest = min(config.min_breadth, grown.topk)
    widening = grown.topk - fewest
    span = config.max_ngram - config.min_ngram + 1
    breadth = fewest * span + (config.max_ngram - len(last)) * widening  # of the n-gram, times the span
    waiting = deque([(-1, last, breadth)])
    while waiting:
        parent, path, breadth = waiting.popleft()
        children = _children(tokens, path, config)
        latest_first = sorted(children, key=lambda token: -children[token][-1])
        for token in latest_first[: max(1, breadth // span)]:
            node = grown.add(parent, token, 1.0)
            if node is not None:
                waiting.append((node, [*path, token], breadth - widening))


def _add_probable(grown: _Tree, tokens: Sequence[int], last: list[int], config: NgramConfig) -> None:
    """Add paths by falling probability, which is their score; of equal ones the path that was found first.

    Of a path with probability r the topk children with the highest counts c are found, ties: the lower token id. They
    have r · (c / Σc) in float64, where the sum runs over these children.
    """
    waiting: list[tuple[float, int, list[int]]] = []  # probability, node of the parent, path

    def find(node: int, path: list[int], prob: float) -> None:
        children = _children(tokens, path, config)
        best = sorted(children, key=lambda token: (-len(children[token]), token))[: grown.topk]
        total = sum(len(children[token]) for token in best)
        waiting.extend((prob * (len(children[token]) / total), node, [*path, token]) for token in best)

    find(-1, last, 1.0)
    while waiting:
        best = max(range(len(waiting)), key=lambda index: waiting[index][0])  # the first of equal ones
        prob, parent, path = waiting.pop(best)
        node = grown.add(parent, path[-1], prob)
        if node is not None:
            find(node, path, prob)


def make(drafter: NgramConfig, target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a drafter of a reference engine, which runs on the host."""
    return ProposalDrafter(Ngram(drafter), config, target.config.vocab_size)
