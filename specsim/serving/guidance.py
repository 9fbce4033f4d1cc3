"""Grammars of the llguidance library: regular expressions, JSON schemas, Lark (pip install 'specsim[grammar]')."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, Self

import torch

from specsim.core.errors import InputError, require, require_type
from specsim.core.pair import Pair
from specsim.core.user_module import user_code


class Guidance:
    """A grammar over a tokenizer's tokens, made for a pair by regex, json_schema or lark.

    form: regex, json_schema, lark, or ebnf (llama.cpp's GBNF). text: the grammar in that form. tokenizer: a fast one
    of transformers. end_ids: tokens that end an output. InputError for a grammar that llguidance does not accept.
    """

    def __init__(self, form: str, text: str, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
            from llguidance.gbnf_to_lark import any_to_lark
        except ImportError as error:
            raise InputError(form, text, "none without llguidance: pip install 'specsim[grammar]'") from error
        is_unicode = text.encode(errors="replace").decode() == text  # a lone surrogate cannot be encoded
        require(is_unicode, form, text, "UTF-8 text")
        require(tokenizer is not None, form, text, "none: the target has no tokenizer")
        require(end_ids, form, text, "none: the target has no end token, eos_token_id in its config")
        self.form = form
        self.text = text
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        with user_code("the target's tokenizer", type(tokenizer).__name__, "a tokenizer that llguidance reads"):
            words = tokenizer.backend_tokenizer.to_str()
            self._tokens = LLTokenizer(words, n_vocab=vocab_size, eos_token=list(end_ids))
        if form == "ebnf":
            with user_code(form, text, "a grammar with a rule root"):
                source = LLMatcher.grammar_from_lark(any_to_lark(text))
        else:
            source = getattr(LLMatcher, f"grammar_from_{form}")(text)
        self._start = LLMatcher(self._tokens, source, log_level=0)  # silent: errors are raised
        self.check(self._start)
        first = self._start.deep_copy()
        first.compute_bitmask()
        self.check(first)
        if first.is_stopped() and not first.is_accepting():
            raise InputError(form, text, "a grammar that at least one output satisfies")
        self._try_first_token()

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
        return GuidanceMatcher(self, self._start.deep_copy())

    def check(self, matcher: Any) -> None:
        """Raise InputError if the library has given up, after which it allows only an end token."""
        if matcher.is_error():
            allowed = f"a grammar that llguidance accepts ({_reason(matcher.get_error())})"
            raise InputError(self.form, self.text, allowed)

    def _try_first_token(self) -> None:
        """Append a token to an empty output, before which the library does not build the states of a large grammar."""
        matcher = self.matcher()
        tokens = (token for token in matcher.allowed().nonzero().flatten().tolist() if token not in self.end_ids)
        for token in itertools.islice(tokens, 1):
            matcher.advance(token)
            matcher.allowed()


class GuidanceMatcher:
    """A matcher of llguidance.

    It never passes an end token to the library. Where a text cannot continue, llguidance stops without counting such a
    token, so a rollback of it would remove the token before it. Raises InputError where the library gives up, as the
    lexer's limits do not show before their state is reached.
    """

    def __init__(self, grammar: Guidance, matcher: Any) -> None:
        self.vocab_size = grammar.vocab_size
        self.has_ended = False
        self._grammar = grammar
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        """Compute the mask bool [V] of the tokens that may come next."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._grammar.check(self._matcher)
        return ((bits[:, None] >> torch.arange(8)) & 1).flatten()[: self.vocab_size].bool()

    def advance(self, token: int) -> bool:
        """Append a token, or return False if it is not allowed."""
        if token in self._grammar.end_ids:
            self.has_ended = bool(self._matcher.is_accepting())
            return self.has_ended
        count = self._matcher.try_consume_tokens([token])
        if count == 0:
            self._matcher.compute_bitmask()  # of a library that has given up, a refused token alone does not tell
        self._grammar.check(self._matcher)
        return count == 1

    def roll_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        handed_over = count - self.has_ended if count else 0
        self.has_ended = self.has_ended and count == 0
        if handed_over:
            self._matcher.rollback(handed_over)
            self._grammar.check(self._matcher)


def _reason(error: str) -> str:
    """Find the line of llguidance's message that describes the error."""
    lines = error.splitlines()
    return next((line for line in lines if line.startswith("error:")), lines[0]).removeprefix("error: ")
