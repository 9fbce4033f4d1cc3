"""Grammars of the library llguidance: regular expressions, JSON schemas, Lark (pip install 'specsim[grammar]')."""

import json
from collections.abc import Sequence
from typing import Any, Self

import torch

from specsim.core.errors import InputError, require, require_type
from specsim.core.pair import Pair


class Guidance:
    """A grammar over a tokenizer's tokens; regex, json_schema and lark make one for a pair.

    form: regex, json_schema or lark; text: the grammar in that form. tokenizer: a fast one of transformers. end_ids:
    tokens that end an output. InputError for a grammar that llguidance does not understand.
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
            raise InputError(form, text, f"what llguidance understands ({_reason(self._start.get_error())})")
        first = self._start.deep_copy()
        first.compute_bitmask()
        if first.is_stopped() and not first.is_accepting():
            raise InputError(form, text, "a grammar of some output: none satisfies this one")

    @classmethod
    def regex(cls, pair: Pair, pattern: str) -> Self:
        """Allow outputs that match a regular expression as a whole."""
        require_type("regex", pattern, str, "a text")
        return cls._of("regex", pattern, pair)

    @classmethod
    def json_schema(cls, pair: Pair, schema: dict[str, Any]) -> Self:
        """Allow outputs that are JSON of this schema."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError("json_schema", type(schema), f"what JSON can hold ({error})") from error
        return cls._of("json_schema", text, pair)

    @classmethod
    def lark(cls, pair: Pair, text: str) -> Self:
        """Allow outputs of a context-free grammar in llguidance's form of Lark."""
        require_type("lark", text, str, "a text")
        return cls._of("lark", text, pair)

    @classmethod
    def _of(cls, form: str, text: str, pair: Pair) -> Self:
        return cls(form, text, pair.tokenizer, pair.target.config.vocab_size, pair.target.config.eos_token_ids)

    def matcher(self) -> "GuidanceMatcher":
        """Make a matcher that stands before the first token of an output."""
        return GuidanceMatcher(self._start.deep_copy(), self.vocab_size, self.end_ids)


class GuidanceMatcher:
    """A matcher of llguidance.

    It never passes an end token on: the library stops by itself where a text cannot go on and does not count such a
    token there, so rolling it back would roll back the token before it.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.has_ended = False
        self._matcher = matcher
        self._end_ids = end_ids

    def allowed(self) -> torch.Tensor:
        """Give the mask bool [V] of the tokens that may come next."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((bits[:, None] >> torch.arange(8)) & 1).flatten()[: self.vocab_size].bool()

    def advance(self, token: int) -> bool:
        """Take a token if it is allowed."""
        if token in self._end_ids:
            self.has_ended = bool(self._matcher.is_accepting())
            return self.has_ended
        return self._matcher.try_consume_tokens([token]) == 1

    def roll_back(self, count: int) -> None:
        """Take the last `count` tokens back."""
        handed_over = count - self.has_ended if count else 0
        self.has_ended = self.has_ended and count == 0
        if handed_over:
            self._matcher.rollback(handed_over)


def _reason(error: str) -> str:
    """Pick the line of llguidance's message that names the error."""
    lines = error.splitlines()
    return next((line for line in lines if line.startswith("error:")), lines[0]).removeprefix("error: ")
