"""Settings of a speculative run, validated when made and frozen afterwards."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require, require_choice, require_int
from specsim.core.limits import (
    MOST_TOKENS,
    MOST_WIDTH,
    BatchSize,
    NonNegativeNumber,
    NumberRange,
    PageSize,
    Penalty,
    Probability,
    RepetitionPenalty,
    SamplingTopK,
    Seed,
    Share,
    StepCount,
    TokenCount,
    TreeTopk,
)
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF, VERIFIER_KINDS, Verifier, VerifierKind, one_of


class TokenBiases(Mapping[int, float]):
    """Additions to logits by token id, which unlike a mappingproxy can be hashed and pickled."""

    __slots__ = ("_bias",)

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = dict(bias)

    def __getitem__(self, token: int) -> float:
        return self._bias[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return repr(self._bias)


Score = Literal["prob", "logprob"]
# Settings by name. `naive-eagle`: a chain of one draft in pages of one slot, as in sgl-project/sglang#6995.
PRESETS: Mapping[str, Mapping[str, Any]] = {"naive-eagle": {"topk": 1, "num_steps": 1, "page_size": 1}}
_FOLLOWS: Any = None  # a field that follows from the others


def ceil_to(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


@check_arguments
@dataclass(frozen=True, slots=True)
class SpecConfig:
    """One setting of speculative decoding."""

    # draft tokens kept at each step; 1 is a chain
    topk: TreeTopk = 4  # K
    # draft steps, the depth of the tree; 0 is plain decoding
    num_steps: StepCount = 3  # S
    # N, root included. Default: a chain's num_steps + 1; all sampled drafts; else 8 or num_steps + 1, whichever is
    # larger, but no more than topk and num_steps propose.
    num_draft_tokens: int = _FOLLOWS
    # tokens in a KV page
    page_size: PageSize = 16
    draft_kv: Literal["lane", "ancestor"] = "lane"  # a re-parented lane attends to its own KV or its true ancestors'
    extend: Literal["fixed", "ragged"] = "fixed"  # rows of a request in draft-extend: S + 1, or the accepted ones only
    release: Literal["finish", "round"] = "finish"  # slots are kept until a request ends, or scratch ones for a round
    score: Score = "prob"  # drafts are ranked by products of probabilities, or by sums of log-softmax (no underflow)
    # `exact` counts a node's own path, as plain decoding would; `relaxed` does not, and is not lossless.
    penalties: Literal["exact", "relaxed"] = "exact"
    # Acceptance of a tree above temperature 0 (specsim.reference.acceptance). A verifier of `best` drafts takes the
    # drafter's best tokens, of `sampled` ones a chain (K = 1), of `siblings` or `distinct`
    # ones K sampled lanes, N = 1 + KS.
    verifier: Verifier = DEFAULT_VERIFIER
    threshold_single: Probability = 1.0  # below 1 lossy on purpose, as threshold_acc
    # accumulated probability at which a draft is accepted; below 1 it is not lossless
    threshold_acc: Probability = 1.0
    typical_epsilon: Probability = 0.09  # not lossless: a draft passes above min(epsilon, delta · exp(-entropy))
    # of rule typical, as in typical_epsilon
    typical_delta: Probability = 0.3
    # most tokens of a request, prompt included; None: the target's own limit
    max_len: Annotated[int, NumberRange(2, MOST_TOKENS)] | None = None

    def __post_init__(self) -> None:
        require_int("topk", self.topk, 1, MOST_WIDTH)
        if self.num_draft_tokens is None:
            object.__setattr__(self, "num_draft_tokens", self._tree_size())
        require_int("num_draft_tokens", self.num_draft_tokens, 1 if self.is_plain else 2)
        self._check_verifier()
        self._check_tree()

    def _check_verifier(self) -> None:
        verifier = self.verifier
        drafts = self.verifier_kind.drafts
        if self.is_plain:
            allowed = f"{one_of(kind for kind in VERIFIER_KINDS if not kind.reads_draft_prob)} when num_steps is 0"
            require(not self.has_draft_prob, "verifier", verifier, allowed)
        elif self.verifier_kind.has_lanes:
            static = 1 + self.topk * self.num_steps
            only = f"{static}: verifier {verifier} verifies topk · num_steps drafts below the root"
            require(self.num_draft_tokens == static, "num_draft_tokens", self.num_draft_tokens, only)
        elif drafts == "sampled":
            require(self.topk == 1, "topk", self.topk, f"1: verifier {verifier} verifies a chain of sampled drafts")
        only = f"1, unless the verifier is {DEFAULT_VERIFIER}"
        for name in KIND_OF[DEFAULT_VERIFIER].thresholds if verifier != DEFAULT_VERIFIER else ():
            require(getattr(self, name) == 1, name, getattr(self, name), only)

    def _check_tree(self) -> None:
        if self.is_plain:
            require(self.topk == 1, "topk", self.topk, "1 when num_steps is 0 (plain decoding)")
        if self.topk == 1:
            only = f"{self.num_steps + 1}: a chain (topk 1) verifies num_steps + 1 tokens"
            require(self.num_draft_tokens == self.num_steps + 1, "num_draft_tokens", self.num_draft_tokens, only)
        most = self.num_candidates + 1
        limit = (
            f"2 to {most}, the root and the {most - 1} candidates of topk {self.topk} and num_steps {self.num_steps}"
        )
        require(self.num_draft_tokens <= most, "num_draft_tokens", self.num_draft_tokens, limit)

    def _tree_size(self) -> int:
        """Compute the number of nodes that follows from topk, num_steps and verifier."""
        if self.topk == 1:
            return self.num_steps + 1
        everything = self.num_candidates + 1
        return everything if self.is_sampled else min(max(8, self.num_steps + 1), everything)

    @classmethod
    def plain(cls, page_size: int = 16, max_len: int | None = None) -> "SpecConfig":
        """Make a setting without drafts, whose trees are a root only."""
        return cls(topk=1, num_steps=0, num_draft_tokens=1, page_size=page_size, max_len=max_len)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "SpecConfig":
        """Make the setting of PRESETS with this name, and these fields changed."""
        require_choice("preset", name, tuple(PRESETS))
        return cls(**{**PRESETS[name], **changes})

    def within(self, limit: int) -> "SpecConfig":
        """Make the setting for a target of `limit` positions, with max_len a number.

        Raises InputError where max_len exceeds the limit or num_steps does not fit.
        """
        max_len = self.max_len or limit
        require(max_len <= limit, "max_len", max_len, f"at most the target's max_position_embeddings, {limit}")
        allowed = f"less than the most tokens of a request, {max_len}"
        require(self.num_steps < max_len, "num_steps", self.num_steps, allowed)
        return replace(self, max_len=max_len)

    @property
    def length_limit(self) -> int:
        """Most tokens of a request, a number even where max_len is None."""
        return MOST_TOKENS if self.max_len is None else self.max_len

    @property
    def is_plain(self) -> bool:
        """Check whether the setting decodes without drafts."""
        return self.num_steps == 0

    @property
    def verifier_kind(self) -> VerifierKind:
        """Record of the verifier."""
        return KIND_OF[self.verifier]

    @property
    def is_sampled(self) -> bool:
        """Check whether drafts are drawn from the drafter's distribution, into a static tree that holds all of them."""
        return self.verifier_kind.drafts != "best"

    @property
    def has_draft_prob(self) -> bool:
        """Check whether verify reads the distribution that drafts were drawn from."""
        return self.verifier_kind.reads_draft_prob

    @property
    def is_lossless(self) -> bool:
        """Check whether the verifier keeps the target's distribution."""
        return self.verifier_kind.is_lossless and self.threshold_single == self.threshold_acc == 1

    @property
    def num_parents(self) -> int:
        """Number of nodes of a static tree that have children, the first ones: M = 1 + K(S-1)."""
        return 1 + self.topk * (self.num_steps - 1)

    @property
    def num_candidates(self) -> int:
        """Number of candidates for the tree: K + (S-1)K², or KS where each sampled lane has one child."""
        return self.candidates_within(self.num_steps)

    def candidates_within(self, depth: int) -> int:
        """Count the candidates of the first `depth` steps, which are the first candidates."""
        if self.is_sampled:
            return self.topk * depth
        return self.topk + (depth - 1) * self.topk**2 if depth else 0

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of candidates of each depth where a node's children are chosen with it, best first.

        K where lanes are drawn; otherwise K below each of the N-1 best nodes above.
        """
        if self.is_sampled:
            return (self.topk,) * self.num_steps
        sizes: list[int] = []
        for _ in range(self.num_steps):
            parents = min(self.num_draft_tokens - 1, sizes[-1]) if sizes else 1
            sizes.append(parents * self.topk)
        return tuple(sizes)

    @property
    def lanes_share_prefix(self) -> bool:
        """Check whether draft lanes read the prefix's own tail, which needs one lane or pages of one slot."""
        return self.page_size == 1 or self.topk == 1

    @property
    def pages_per_lane(self) -> int:
        """Most pages of one lane, its copy of the prefix tail included."""
        return ceil_to(self.page_size - 1 + self.num_steps, self.page_size) // self.page_size

    @property
    def need(self) -> int:
        """Most columns beyond L that one round may write, for any L."""
        if self.lanes_share_prefix:
            return max(self.num_steps * self.topk, self.num_draft_tokens)
        return max(self.pages_per_lane * self.page_size * self.topk, self.num_draft_tokens)

    def reserved_columns(self, seq_len: int) -> int:
        """Count the columns of a request of L tokens under release `finish`: two rounds ahead, in whole pages."""
        return ceil_to(seq_len + 2 * self.need, self.page_size)


@check_arguments
@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Settings of the scheduler."""

    # `sync`: a step's results are read before the next is planned; `overlap`: one step later, while the device works.
    schedule: Literal["sync", "overlap"] = "sync"
    max_running: BatchSize = 8  # requests that hold a row of the pool at once
    num_slots: TokenCount = 4096  # KV slots of the pool, whole pages of them
    chunk_tokens: TokenCount | None = None  # prompt tokens that a step prefills, over all requests; None: no limit
    prefix_cache: bool = False  # pages of committed tokens outlive their requests, for others with the same prefix
    # Victim among the lowest priority: latest to arrive, shortest (least to compute again), longest (most slots freed).
    preemption: Literal["latest", "shortest", "longest"] = "latest"


@check_arguments
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop conditions of one request.

    Every number but max_new_tokens is off by default.
    """

    temperature: NonNegativeNumber = 0.0  # 0: greedy
    top_k: SamplingTopK = 0
    top_p: Share = 1.0
    min_p: Probability = 0.0
    repetition_penalty: RepetitionPenalty = 1.0  # counts prompt and output
    presence_penalty: Penalty = 0.0  # counts the output only, as engines do
    frequency_penalty: Penalty = 0.0  # counts the output only, as engines do
    # Additions to logits by token id, after the penalties (transformers: before them). The fast implementation adds in
    # float32, where a huge bias rounds the logits away: to allow only a few tokens, ban the others.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_new_tokens: TokenCount = 64
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an output and are kept
    ignore_eos: bool = False
    seed: Seed = 0  # of 64 bits, names the random stream
    stop: tuple[str, ...] = ()  # texts that end an output and are cut from its text with all that follows
    stop_regex: tuple[str, ...] = ()  # patterns of Python's re that end an output; a match stays in its text

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", TokenBiases(self.logit_bias))
        for token in self.logit_bias:
            require_int("logit_bias", token, 0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            require_int("stop_token_ids", token, 0)
        for name in ("stop", "stop_regex"):
            texts = getattr(self, name)
            is_list = isinstance(texts, (tuple, list)) and all(isinstance(text, str) and text for text in texts)
            require(is_list, name, texts, "a tuple of texts of at least one character")
            object.__setattr__(self, name, tuple(texts))
        for pattern in self.stop_regex:
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise InputError(
                    "stop_regex", self.stop_regex, f"patterns that Python's re compiles ({error})"
                ) from error
