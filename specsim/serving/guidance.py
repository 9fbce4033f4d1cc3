"""Grammars of the llguidance library: regular expressions, JSON schemas, Lark (pip install 'specsim[grammar]')."""

import json
from collections.abc import Sequence
from typing import Any, Self

import torch

from specsim.core.errors import InputError, require, require_type
from specsim.core.pair import Pair


class Guidance:
    """A grammar over a tokenizer's tokens, made for a pair by regex, json_schema or lark.

    form: regex, json_schema or lark. text: the grammar in that form. tokenizer: a fast one of transformers. end_ids:
    tokens that end an output. Raises InputError for a grammar that llguidance does not accept.
    """

    def __init__(self, form: str, text: str, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise InputError(form, text, "none without llguidance: pip install 'specsim[grammar]'") from error
        require(tokenizer is not None, form, text, "none: the target has no tokenizer")
        require(end_ids, form, text, "none: the target has no end token, eos_token_id in its config")
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        words = tokenizer.backend_tokenizer.to_str()
        self._tokens = LLTokenizer(words, n_vocab=vocab_size, eos_token=list(end_ids))
        self._start = LLMatcher(self._tokens, getattr(LLMatcher, f"grammar_from_{form}")(text))
        if self._start.is_error():
            raise InputError(form, text, f"a grammar that llguidance accepts ({_reason(self._start.get_error())})")
        first = self._start.deep_copy()
        first.compute_bitmask()
        if first.is_stopped() and not first.is_accepting():
            raise InputError(form, text, "a grammar that at least one output satisfies")

    @classmethod
    def regex(cls, pair: Pair, pattern: str) -> Self:
        """Allow outputs that match a regular expression as a whole."""
        require_type("regex", pattern, str, "a text")
        return cls._of("regex", pattern, pair)

    @classmethod
    def json_schema(cls, pair: Pair, schema: dict[str, Any]) -> Self:
        """Allow outputs that are JSON and valid under this schema."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError("json_schema", type(schema), f"a JSON value ({error})") from error
        return cls._of("json_schema", text, pair)

    @classmethod
    def lark(cls, pair: Pair, text: str) -> Self:
        """Allow outputs of a context-free grammar in llguidance's variant of Lark."""
        require_type("lark", text, str, "a text")
        return cls._of("lark", text, pair)

    @classmethod
    def _of(cls, form: str, text: str, pair: Pair) -> Self:
        return cls(form, text, pair.tokenizer, pair.target.config.vocab_size, pair.target.config.eos_token_ids)

    def matcher(self) -> "GuidanceMatcher":
        """Make a matcher in the state before an output's first token."""
        return GuidanceMatcher(self._start.deep_copy(), self.vocab_size, self.end_ids)


class GuidanceMatcher:
    """A matcher of llguidance.

    It never passes an end token to the library. Where a text cannot continue, llguidance stops without counting such a
    token, so a rollback of it would remove the token before it.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.has_ended = False
        self._matcher = matcher
        self._end_ids = end_ids

    def allowed(self) -> torch.Tensor:
        """Compute the mask bool [V] of the tokens that may come next."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((bits[:, None] >> torch.arange(8)) & 1).flatten()[: self.vocab_size].bool()

    def advance(self, token: int) -> bool:
        """Append a token, or return False if it is not allowed."""
        if token in self._end_ids:
            self.has_ended = bool(self._matcher.is_accepting())
            return self.has_ended
        return self._matcher.try_consume_tokens([token]) == 1

    def roll_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        handed_over = count - self.has_ended if count else 0
        self.has_ended = self.has_ended and count == 0
        if handed_over:
            self._matcher.rollback(handed_over)


def _reason(error: str) -> str:
    """Find the line of llguidance's message that describes the error."""
    lines = error.splitlines()
    return next((line for line in lines if line.startswith("error:")), lines[0]).removeprefix("error: ")
