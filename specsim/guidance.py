"""Grammars of the library llguidance: regular expressions, JSON schemas, Lark (pip install 'specsim[grammar]')."""

import json
from collections.abc import Sequence
from typing import Any, Self

import torch

from specsim.config import InputError


class Guidance:
    """A grammar of llguidance over a tokenizer's tokens.

    tokenizer: a fast tokenizer of transformers (pair.tokenizer). end_ids: the tokens that end an output. source: as
    llguidance takes it; regex, json_schema and lark make it. InputError for one that it does not understand.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int], source: str):
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise InputError("grammar", "llguidance", "an installed library: pip install 'specsim[grammar]'") from error
        self.vocab_size, self.end_ids = vocab_size, frozenset(end_ids)
        text = tokenizer.backend_tokenizer.to_str()
        self._tokens = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_ids))
        self._start = LLMatcher(self._tokens, source)
        if self._start.is_error():
            raise InputError("grammar", source, f"what llguidance understands ({self._start.get_error()})")

    @classmethod
    def regex(cls, pair, pattern: str) -> Self:
        """Outputs that match a regular expression as a whole."""
        return cls._of(pair, "grammar_from_regex", pattern)

    @classmethod
    def json_schema(cls, pair, schema: dict[str, Any]) -> Self:
        """Outputs that are JSON of this schema."""
        return cls._of(pair, "grammar_from_json_schema", json.dumps(schema))

    @classmethod
    def lark(cls, pair, text: str) -> Self:
        """Outputs of a context-free grammar in llguidance's form of Lark."""
        return cls._of(pair, "grammar_from_lark", text)

    @classmethod
    def _of(cls, pair, form: str, text: str) -> Self:
        if pair.tokenizer is None:
            raise InputError("grammar", text, "none: the target has no tokenizer")
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise InputError("grammar", "llguidance", "an installed library: pip install 'specsim[grammar]'") from error
        config = pair.target.config
        return cls(pair.tokenizer, config.vocab_size, config.eos_token_ids, getattr(LLMatcher, form)(text))

    def matcher(self) -> "GuidanceMatcher":
        """Before the first token of an output."""
        return GuidanceMatcher(self._start.deep_copy(), self.vocab_size, self.end_ids)


class GuidanceMatcher:
    """A matcher of llguidance.

    A token that ends the output is never handed over: the library stops by itself where a text cannot go on, and does
    not count such a token there, so that giving it back would give back the token before it.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: frozenset[int]):
        self.vocab_size, self.has_ended = vocab_size, False
        self._matcher, self._end_ids = matcher, end_ids

    def allowed(self) -> torch.Tensor:
        """bool [V]."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((bits[:, None] >> torch.arange(8)) & 1).flatten()[: self.vocab_size].bool()

    def advance(self, token: int) -> bool:
        """Take a token if it is allowed."""
        if token in self._end_ids:
            self.has_ended = bool(self._matcher.is_accepting())
            return self.has_ended
        return self._matcher.try_consume_tokens([token]) == 1

    def roll_back(self, count: int) -> None:
        """Give the last tokens back."""
        handed_over = count - self.has_ended if count else 0
        self.has_ended = self.has_ended and count == 0
        if handed_over:
            self._matcher.rollback(handed_over)
