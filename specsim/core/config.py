"""Settings of a speculative run: validated when made, frozen afterwards."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from specsim.core.errors import InputError

VERIFIERS = ("target_only", "typical", "rejection", "block", "multi_round", "gumbel")
_MOST = sys.float_info.max


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise InputError(name, value, allowed)


def _require_int(name: str, value: object, least: int) -> None:
    _require(type(value) is int and value >= least, name, value, f"an integer of at least {least}")


def _require_finite(name: str, value: object, least: float, most: float, allowed: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(number and least <= value <= most, name, value, allowed)


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """One setting of speculative decoding.

    topk, num_steps and num_draft_tokens (root included) are K, S and N of the dimension key in specsim.core.phases.
    `draft_kv`: `lane`, a lane keeps its own KV when it is re-parented, or `ancestor`, a node attends to its true
    ancestors. `extend`: `fixed`, every request has num_steps + 1 rows in draft-extend, or `ragged`, the accepted rows
    only. `release`: `finish`, slots are kept until a request ends, or `round`, scratch slots are returned every
    round. `score`: lanes are ranked by products of probabilities (`prob`) or by sums of their logarithms (`logprob`).
    `penalties`: `exact` counts a node's own path as plain decoding would; `relaxed` does not, and is not lossless.
    verifier: how far the target takes a tree at temperatures above 0 (specsim.reference.acceptance). `target_only` and
    `typical` take the drafter's best tokens; `rejection`, `block` and `gumbel` a sampled chain (topk 1); `multi_round`
    topk sampled lanes, num_draft_tokens 1 + topk · num_steps. Only `typical` is not lossless. threshold_single,
    threshold_acc: thresholds of target_only; below 1 they are lossy on purpose. typical_epsilon, typical_delta: a draft
    is typical above min(epsilon, delta · exp(-entropy)).
    max_len: most tokens of a request, prompt included; None means the target's own limit.
    """

    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int = 8
    page_size: int = 16
    draft_kv: Literal["lane", "ancestor"] = "lane"
    extend: Literal["fixed", "ragged"] = "fixed"
    release: Literal["finish", "round"] = "finish"
    score: Literal["prob", "logprob"] = "prob"
    penalties: Literal["exact", "relaxed"] = "exact"
    verifier: Literal["target_only", "typical", "rejection", "block", "multi_round", "gumbel"] = "target_only"
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    max_len: int | None = None

    def __post_init__(self) -> None:
        plain = self.num_steps == 0
        for name, least in (("topk", 1), ("num_steps", 0), ("num_draft_tokens", 1 if plain else 2), ("page_size", 1)):
            _require_int(name, getattr(self, name), least)
        _require(self.page_size <= 2**16, "page_size", self.page_size, "an integer from 1 to 65536")
        for name, allowed in _CHOICES.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), " or ".join(allowed))
        self._check_verifier()
        self._check_tree()
        for name in ("threshold_single", "threshold_acc", "typical_epsilon", "typical_delta"):
            _require_finite(name, getattr(self, name), 0, 1, "a number from 0 to 1")
        if self.max_len is not None:
            _require_int("max_len", self.max_len, 2)

    def _check_verifier(self) -> None:
        verifier, topk, num_draft_tokens = self.verifier, self.topk, self.num_draft_tokens
        if self.is_plain:
            _require(not self.has_draft_prob, "verifier", verifier, "one that reads no draft law when num_steps is 0")
        elif verifier == "multi_round":
            static = 1 + topk * self.num_steps
            only = f"{static}: verifier multi_round verifies topk · num_steps drafts below the root"
            _require(num_draft_tokens == static, "num_draft_tokens", num_draft_tokens, only)
        elif self.is_sampled:
            _require(topk == 1, "topk", topk, f"1: verifier {verifier} verifies a chain of sampled drafts")
        for name in ("threshold_single", "threshold_acc") if verifier != "target_only" else ():
            _require(getattr(self, name) == 1, name, getattr(self, name), "1, unless the verifier is target_only")

    def _check_tree(self) -> None:
        topk, num_steps, num_draft_tokens = self.topk, self.num_steps, self.num_draft_tokens
        if num_steps == 0:
            _require(topk == 1, "topk", topk, "1 when num_steps is 0 (plain decoding)")
        if topk == 1:
            only = f"{num_steps + 1}: a chain (topk 1) verifies num_steps + 1 tokens"
            _require(num_draft_tokens == num_steps + 1, "num_draft_tokens", num_draft_tokens, only)
        most = self.num_candidates + 1
        limit = f"2 to {most}, the root and the {most - 1} candidates of topk {topk} and num_steps {num_steps}"
        _require(num_draft_tokens <= most, "num_draft_tokens", num_draft_tokens, limit)

    @classmethod
    def plain(cls, page_size: int = 16, max_len: int | None = None) -> "SpecConfig":
        """Decoding without drafts: a round whose tree is its root."""
        return cls(topk=1, num_steps=0, num_draft_tokens=1, page_size=page_size, max_len=max_len)

    def within(self, limit: int) -> "SpecConfig":
        """The setting for a target of at most `limit` positions, its max_len a number."""
        if self.max_len is not None and self.max_len > limit:
            raise InputError("max_len", self.max_len, f"at most the target's max_position_embeddings, {limit}")
        max_len = self.max_len or limit
        if self.num_steps >= max_len:
            raise InputError("num_steps", self.num_steps, f"less than the most tokens of a request, {max_len}")
        return replace(self, max_len=max_len)

    @property
    def is_plain(self) -> bool:
        return self.num_steps == 0

    @property
    def is_sampled(self) -> bool:
        """Whether drafts are drawn from the drafter's law; no choice is made among them, and the tree is static."""
        return self.verifier in ("rejection", "block", "multi_round", "gumbel")

    @property
    def has_draft_prob(self) -> bool:
        """Whether verify reads the law that drafts were drawn from."""
        return self.is_sampled and self.verifier != "gumbel"

    @property
    def is_lossless(self) -> bool:
        """Whether the verifier keeps the target's law."""
        return self.verifier != "typical" and self.threshold_single == self.threshold_acc == 1

    @property
    def num_parents(self) -> int:
        """Nodes of a static tree that have children, the first so many: 1 + K(S-1)."""
        return 1 + self.topk * (self.num_steps - 1)

    @property
    def num_candidates(self) -> int:
        """Size of the pool that the tree is chosen from: K + (S-1)K², or KS where every sampled lane has one child."""
        if self.is_sampled:
            return self.topk * self.num_steps
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def lanes_share_prefix(self) -> bool:
        """Whether draft lanes read the prefix's own tail: without pages or with one lane no copy of it is needed."""
        return self.page_size == 1 or self.topk == 1

    @property
    def pages_per_lane(self) -> int:
        """Most pages that one lane's copied prefix tail and steps can cover."""
        return ceil_to(self.page_size - 1 + self.num_steps, self.page_size) // self.page_size

    @property
    def need(self) -> int:
        """Columns beyond L that one round may touch, for any L."""
        if self.lanes_share_prefix:
            return max(self.num_steps * self.topk, self.num_draft_tokens)
        return max(self.pages_per_lane * self.page_size * self.topk, self.num_draft_tokens)

    def reserved_columns(self, seq_len: int) -> int:
        """Columns a request of L tokens owns under release `finish`: two rounds ahead, in whole pages."""
        return ceil_to(seq_len + 2 * self.need, self.page_size)


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """How a scheduler serves requests.

    schedule `sync`: results of a step are read before the next is planned; `overlap`: they are read one step later, so
    that the host can plan while the device works. max_running: most requests that hold a place at once. num_slots: KV
    slots of the pool, whole pages of them. chunk_tokens: most prompt tokens that a step prefills, over all requests;
    None is no limit. prefix_cache: whether pages of committed tokens outlive their requests for others with the same
    prefix. preemption: who gives way when slots run out, among those of the lowest priority: the `latest` to arrive,
    the `shortest` (least to compute again) or the `longest` (most slots given back).
    """

    schedule: Literal["sync", "overlap"] = "sync"
    max_running: int = 8
    num_slots: int = 4096
    chunk_tokens: int | None = None
    prefix_cache: bool = False
    preemption: Literal["latest", "shortest", "longest"] = "latest"

    def __post_init__(self) -> None:
        for name, allowed in _SERVING_CHOICES.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), " or ".join(allowed))
        for name, most in (("max_running", 2**16), ("num_slots", 2**31 - 1)):
            _require_int(name, getattr(self, name), 1)
            _require(getattr(self, name) <= most, name, getattr(self, name), f"an integer from 1 to {most}")
        if self.chunk_tokens is not None:
            _require_int("chunk_tokens", self.chunk_tokens, 1)
        _require(type(self.prefix_cache) is bool, "prefix_cache", self.prefix_cache, "True or False")


_SERVING_CHOICES = {"schedule": ("sync", "overlap"), "preemption": ("latest", "shortest", "longest")}
_CHOICES = {
    "draft_kv": ("lane", "ancestor"),
    "extend": ("fixed", "ragged"),
    "release": ("finish", "round"),
    "score": ("prob", "logprob"),
    "penalties": ("exact", "relaxed"),
    "verifier": VERIFIERS,
}


class _Biases(Mapping):
    """Additions to logits by token id; unlike a mappingproxy they can be hashed and pickled."""

    __slots__ = ("_bias",)

    def __init__(self, bias: Mapping[int, float]):
        self._bias = dict(bias)

    def __getitem__(self, token: int) -> float:
        return self._bias[token]

    def __iter__(self):
        return iter(self._bias)

    def __len__(self):
        return len(self._bias)

    def __hash__(self):
        return hash(frozenset(self.items()))

    def __repr__(self):
        return repr(self._bias)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0 and frequency_penalty 0
    are off. The repetition penalty counts prompt and output, presence and frequency the output only, as engines do.
    logit_bias maps token ids to additions to their logits (the fast column adds in float32: to allow a few tokens, ban
    the others). seed names the random stream (64 bits). stop_token_ids end an output and are kept; stop: texts that end
    it and are cut from its text with all that follows.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_finite("temperature", self.temperature, 0, _MOST, "0 (greedy) or a positive number")
        _require_int("top_k", self.top_k, 0)
        _require_finite("top_p", self.top_p, math.ulp(0), 1, "a number above 0 and at most 1")
        _require_finite("min_p", self.min_p, 0, 1, "a number from 0 to 1")
        _require_finite("repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "a number from 0.001 to 1000")
        for name in ("presence_penalty", "frequency_penalty"):
            _require_finite(name, getattr(self, name), -2, 2, "a number from -2 to 2")
        is_mapping = isinstance(self.logit_bias, Mapping)
        _require(is_mapping, "logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        object.__setattr__(self, "logit_bias", _Biases(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _require_int("logit_bias", token, 0)
            _require_finite("logit_bias", bias, -_MOST, _MOST, "finite numbers")
        is_list = isinstance(self.stop_token_ids, (tuple, list, set, frozenset))
        _require(is_list, "stop_token_ids", self.stop_token_ids, "a tuple of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0)
        is_list = isinstance(self.stop, (tuple, list)) and all(isinstance(text, str) and text for text in self.stop)
        _require(is_list, "stop", self.stop, "a tuple of texts of at least one character")
        object.__setattr__(self, "stop", tuple(self.stop))
        _require_int("max_new_tokens", self.max_new_tokens, 1)
        _require(type(self.ignore_eos) is bool, "ignore_eos", self.ignore_eos, "True or False")
        _require(type(self.seed) is int and 0 <= self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2^64 - 1")
