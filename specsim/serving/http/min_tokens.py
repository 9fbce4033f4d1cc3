"""The grammar of outputs that do not stop before a number of tokens."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from specsim.core.grammar import Grammar, Matcher


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Outputs whose first tokens are none of those that would end them, of another grammar or of any form."""

    count: int  # tokens
    end_ids: Collection[int]
    vocab_size: int
    grammar: Grammar | None = None

    def matcher(self) -> "MinTokensMatcher":
        """Make a matcher in the state before an output's first token."""
        return MinTokensMatcher(self, None if self.grammar is None else self.grammar.matcher())


class MinTokensMatcher:
    """State of such a grammar; where the other grammar can only end, it may end."""

    def __init__(self, outputs: MinTokens, inner: Matcher | None) -> None:
        self.vocab_size = outputs.vocab_size
        self._outputs = outputs
        self._inner = inner
        self._length = 0
        self.has_ended = False

    def allowed(self) -> torch.Tensor:
        """Compute the mask bool [V] of the tokens that may come next."""
        ones_V = torch.ones(self.vocab_size, dtype=torch.bool)
        allowed_V = ones_V if self._inner is None else self._inner.allowed()
        if self._length >= self._outputs.count:
            return allowed_V
        going_on_V = allowed_V.clone()
        going_on_V[list(self._outputs.end_ids)] = False
        return going_on_V if going_on_V.any() else allowed_V

    def advance(self, token: int) -> bool:
        """Append a token, or return False if it is not allowed."""
        is_early = self._length < self._outputs.count and token in self._outputs.end_ids
        if is_early and not self.allowed()[token]:
            return False
        is_allowed = self._inner is None or self._inner.advance(token)
        self._length += is_allowed
        self._note_end()
        return is_allowed

    def roll_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        self._length -= count
        if self._inner is not None:
            self._inner.roll_back(count)
        self._note_end()

    def _note_end(self) -> None:
        self.has_ended = self._inner is not None and self._inner.has_ended
