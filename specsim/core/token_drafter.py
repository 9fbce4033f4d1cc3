"""Drafters that read token ids only: their protocol, and the settings of n-gram and suffix drafters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError
from specsim.core.limits import NonNegativeNumber, NumberRange, PositiveInteger, Probability

Order = Literal["recency", "probability"]


class TreeLimits(NamedTuple):
    """Limits of one request's tree."""

    max_depth: int  # drafts on one path, S
    max_nodes: int  # drafts in the tree, N - 1
    topk: int  # children of one node; 1: a chain


class Proposal(NamedTuple):
    """Candidates below the root, parents before their children.

    An empty proposal is legal: the round is then a plain step. Siblings have distinct tokens.
    """

    tokens: Sequence[int]
    parents: Sequence[int]  # index of an earlier candidate, -1 for the root
    scores: Sequence[float]  # higher is better; a child counts at most its parent's


class TokenDrafter(Protocol):
    """A drafter without weights and KV, which sees the token ids of each request."""

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        """Propose what follows the tokens, prompt and output so far, whose last one is the root."""
        ...

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Receive a request's tokens at its end, so that its state can be dropped."""
        ...


@dataclass(frozen=True, slots=True)
class UserDrafter:
    """The methods of a user's token drafter, loaded from a module or file."""

    propose: Callable[..., Proposal]
    finish: Callable[..., None]
    kind: str  # its class name, or what it calls itself


class LookupConfig:
    """Settings of a drafter without weights; every kind has a frozen dataclass of its own."""

    __slots__ = ()
    kind: ClassVar[str]  # name of its record in specsim.core.kinds


@check_arguments
@dataclass(frozen=True, slots=True)
class NgramConfig(LookupConfig):
    """Settings of the n-gram drafter: prompt lookup for a chain, a trie for a tree.

    Sources: n-gram proposer of vLLM; n-gram trie of SGLang.
    """

    kind: ClassVar[str] = "ngram"
    min_ngram: PositiveInteger = 1  # shortest sequence of last tokens that is looked up
    max_ngram: PositiveInteger = 4  # longest one
    # What follows is for trees only.
    trie_depth: PositiveInteger = 18  # tokens of the longest path of the trie, a matched n-gram included
    # Which continuations come first. `recency`: breadth first, from the last seen one; `probability`: the largest
    # product of relative counts.
    order: Order = "recency"
    # children of a node below the longest n-gram under `recency`; shorter ones have up to topk
    min_breadth: PositiveInteger = 1

    def __post_init__(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise InputError("min_ngram", self.min_ngram, f"at most max_ngram, {self.max_ngram}")
        if self.trie_depth <= self.max_ngram:
            raise InputError("trie_depth", self.trie_depth, f"more than max_ngram, {self.max_ngram}")


@check_arguments
@dataclass(frozen=True, slots=True)
class SuffixConfig(LookupConfig):
    """Settings of the suffix drafter.

    Source: SuffixDecoding (arXiv 2411.04975) as in ArcticInference, with the defaults of vLLM.
    """

    kind: ClassVar[str] = "suffix"
    # tokens of the longest path of a suffix tree, the matched ones included
    max_depth: Annotated[int, NumberRange(at_least=2)] = 24
    factor: NonNegativeNumber = 1.0  # m matched tokens allow floor(m · factor + offset) drafts
    offset: float = 0.0
    min_prob: Probability = 0.1  # least estimated probability of a draft
    shared: bool = True  # a second tree holds the outputs of finished requests
    max_cached_requests: PositiveInteger = 10_000  # outputs in the shared tree; the oldest one leaves first
    least_match: PositiveInteger = 1  # fewest last tokens of the text that are continued

    def __post_init__(self) -> None:
        if self.least_match >= self.max_depth:
            raise InputError("least_match", self.least_match, f"less than max_depth, {self.max_depth}")


NEXT_TO_A_HEAD = SuffixConfig(least_match=4)  # what a head drafts is better than what follows a shorter match
