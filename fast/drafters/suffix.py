"""Suffix decoding with suffix tries that grow with each request; the reference defines the drafts."""

import heapq
import math
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.target import Target
from specsim.core.token_drafter import Proposal, SuffixConfig, TreeLimits
from specsim.fast.drafters.counted_trie import CountedTrie, Path, RequestTexts
from specsim.fast.drafters.host import HostDrafter
from specsim.fast.drafters.steps import StepDrafter


class Suffix:
    """A suffix drafter: a trie for each request, and one for the outputs of finished requests."""

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._tries = RequestTexts(lambda: CountedTrie(config.max_depth))
        self._shared = CountedTrie(config.max_depth)
        self._outputs: dict[int, list[int]] = {}  # in the shared trie, the oldest first

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        trie = self._tries.follow(request_id, tokens)
        most = min(self._config.max_depth, len(tokens)) - 1
        best = ScoredProposal(Proposal([], [], []), 0.0)
        for m in range(self._config.least_match, most + 1):
            best = _better(best, trie, trie.suffix(m), self._config, limits)
        shared = ScoredProposal(Proposal([], [], []), 0.0)
        for m in range(self._config.least_match, most + 1 if self._outputs else 0):
            path = self._shared.find(tokens[-m:])
            if path is None:
                break
            shared = _better(shared, self._shared, path, self._config, limits)
        return (shared if shared.score > best.score else best).proposal

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        self._tries.drop(request_id)
        if not self._config.shared:
            return
        if request_id in self._outputs:
            self._shared.remove(self._outputs.pop(request_id))
        self._shared.open()
        for token in tokens[prompt_len:]:
            self._shared.append(token)
        self._outputs[request_id] = self._shared.text
        self._shared.open()
        if len(self._outputs) > self._config.max_cached_requests:
            self._shared.remove(self._outputs.pop(next(iter(self._outputs))))


class ScoredProposal(NamedTuple):
    """A tree of drafts and the sum of their scores."""

    proposal: Proposal
    score: float


def _better(
    best: ScoredProposal, trie: CountedTrie, path: Path, config: SuffixConfig, limits: TreeLimits
) -> ScoredProposal:
    """Return the drafts below a path, unless those of a shorter path have a higher sum."""
    allowed = path.length * config.factor + config.offset + 1e-6
    budget = limits.max_nodes if allowed >= limits.max_nodes else math.floor(allowed)
    proposal = _grow(trie, path, budget, config.min_prob, limits)
    score = 0.0
    for prob in proposal.scores:
        score += prob
    return ScoredProposal(proposal, score) if score >= best.score else best


def _grow(trie: CountedTrie, path: Path, budget: int, min_prob: float, limits: TreeLimits) -> Proposal:
    proposal: tuple[list[int], list[int], list[float]] = ([], [], [])
    tokens, parents, scores = proposal
    deepest = path.length + limits.max_depth
    waiting: list[tuple[float, int, int, int, Path]] = []  # -probability, order of discovery, parent, token, path
    order = count()
    node = -1
    prob = 1.0
    while len(tokens) < budget:
        if path.length < deepest:
            best = heapq.nsmallest(limits.topk, trie.followers(path), key=attrgetter("rank"))
            for follower in best:
                child_prob = prob * (follower.occurrences / path.node.count)
                if child_prob >= min_prob:
                    heapq.heappush(waiting, (-child_prob, next(order), node, follower.token, follower.path))
        if not waiting:
            break
        negative, _, parent, token, path = heapq.heappop(waiting)
        prob = -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(prob)
        node = len(tokens) - 1
    return Proposal(*proposal)


def make(drafter: SuffixConfig, target: Target, config: SpecConfig, on: Placement) -> StepDrafter:
    """Make the drafter of a fast engine, which runs on the host."""
    return HostDrafter(Suffix(drafter), config, target.config.vocab_size, on.device)
