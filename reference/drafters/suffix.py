"""Suffix decoding (arXiv 2411.04975, as in ArcticInference), straight from the definition.

Two texts are searched: the request's own tokens, and the outputs of finished requests. With the second one, drafts and
so acceptance depend on other requests; tokens do not.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.proposals import ProposalDrafter
from specsim.core.target import Target
from specsim.core.token_drafter import Proposal, SuffixConfig, TreeLimits
from specsim.reference.drafters.occurrences import followers, occurrences

Texts = Sequence[Sequence[int]]  # each one for itself: no path goes from one to another


class Suffix:
    """A suffix drafter, which looks through all texts in every round."""

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._outputs: dict[int, list[int]] = {}  # of finished requests, the oldest first

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        """Propose the better continuation of the two; of equal ones the one from the request's own tokens."""
        continuation = best_continuation([tokens], tokens, self._config, limits)
        shared = best_continuation(list(self._outputs.values()), tokens, self._config, limits)
        return (shared if shared.score > continuation.score else continuation).proposal

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep the output; an earlier one of the same request id leaves, and so does the oldest of too many."""
        if self._config.shared:
            self._outputs.pop(request_id, None)
            self._outputs[request_id] = list(tokens[prompt_len:])
            if len(self._outputs) > self._config.max_cached_requests:
                del self._outputs[next(iter(self._outputs))]


class ScoredProposal(NamedTuple):
    """A tree of drafts and the sum of their scores."""

    proposal: Proposal
    score: float


def best_continuation(texts: Texts, tokens: Sequence[int], config: SuffixConfig, limits: TreeLimits) -> ScoredProposal:
    """Continue the last m tokens, for every m that the texts contain, and take the highest sum of scores.

    m runs from least_match to one less than max_depth and the number of tokens. Of equal sums the longest m counts. The
    budget of drafts is ⌊m·factor + offset + 10⁻⁶⌋, at most max_nodes. The sum is taken in float64 in the order of the
    drafts.
    """
    best = ScoredProposal(Proposal([], [], []), 0.0)
    for m in range(config.least_match, min(config.max_depth, len(tokens))):
        last = list(tokens[-m:])
        if not _count(texts, last):
            break
        allowed = m * config.factor + config.offset + 1e-6
        budget = limits.max_nodes if allowed >= limits.max_nodes else math.floor(allowed)
        proposal = _grow(texts, last, budget, config, limits)
        score = 0.0
        for prob in proposal.scores:
            score += prob
        if score >= best.score:
            best = ScoredProposal(proposal, score)
    return best


def _grow(texts: Texts, last: list[int], budget: int, config: SuffixConfig, limits: TreeLimits) -> Proposal:
    """Add drafts by falling estimated probability, which is their score; of equal ones the one found first.

    Below a path with probability r that occurs n times, the topk tokens that follow most often (c times; ties: the
    lower token id) have r · (c / n) in float64. Those below min_prob are left out, and paths of more than max_depth
    tokens of the config do not count. With topk 1 this follows the most frequent token, as ArcticInference's path does.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    waiting: list[tuple[float, int, list[int]]] = []  # probability, parent, path

    def find(node: int, path: list[int], prob: float) -> None:
        if len(path) - len(last) == limits.max_depth or len(path) == config.max_depth:
            return
        counts = Counter[int]()
        for text in texts:
            counts.update({token: len(starts) for token, starts in followers(text, path).items()})
        total = _count(texts, path)
        for token in sorted(counts, key=lambda token: (-counts[token], token))[: limits.topk]:
            child_prob = prob * (counts[token] / total)
            if child_prob >= config.min_prob:
                waiting.append((child_prob, node, [*path, token]))

    find(-1, last, 1.0)
    while waiting and len(tokens) < budget:
        prob, parent, path = waiting.pop(max(range(len(waiting)), key=lambda index: waiting[index][0]))
        tokens.append(path[-1])
        parents.append(parent)
        scores.append(prob)
        find(len(tokens) - 1, path, prob)
    return Proposal(tokens, parents, scores)


def _count(texts: Texts, path: list[int]) -> int:
    return sum(len(occurrences(text, path)) for text in texts)


def make(drafter: SuffixConfig, target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a drafter of a reference engine, which runs on the host."""
    return ProposalDrafter(Suffix(drafter), config, target.config.vocab_size)
