"""Constrained decoding: which tokens may follow, asked at the nodes of a tree.

A request's grammar says of its output, token by token, what may come next. Where it stands is a function of the tokens
that the request has, so nothing has to be kept of it between rounds, and a resumed request stands where it stood.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.phases import Batch, VerifyInput
from specsim.core.pool import KVPool


class Matcher(Protocol):
    """Where one output stands in its grammar; changed by its own verbs only.

    vocab_size: V. has_ended: whether the last token ended the output, after which nothing is asked any more.
    """

    vocab_size: int
    has_ended: bool

    def allowed(self) -> torch.Tensor:
        """bool [V]: the tokens that may follow, at least one; the one that ends outputs where it may end here."""
        ...

    def advance(self, token: int) -> bool:
        """Take a token; False, and nothing has changed, if it is not allowed."""
        ...

    def roll_back(self, count: int) -> None:
        """Give the last `count` tokens back."""
        ...


class Grammar(Protocol):
    """What outputs are allowed. It does not change."""

    def matcher(self) -> Matcher:
        """A new one, before the first token of an output."""
        ...


Grammars = Mapping[int, Grammar]  # by request id; a request that has none is free


def check(grammars: Grammars, config: SpecConfig, vocab_size: int) -> None:
    """InputError for a setting that takes drafts whatever their probability, and so could leave the grammar, and for a
    grammar over other tokens than the target's.
    """
    if grammars and config.threshold_single == 0:
        raise InputError("threshold_single", config.threshold_single, "a number above 0 with a grammar")
    for grammar in grammars.values():
        own = grammar.matcher().vocab_size
        if own != vocab_size:
            raise InputError("grammars", f"one over {own} tokens", f"grammars over the target's {vocab_size} tokens")


def after(grammar: Grammar, output: Sequence[int]) -> Matcher:
    """A matcher that has taken an output, up to the token that ends it; InputError if the grammar forbids it."""
    matcher = grammar.matcher()
    for place, token in enumerate(output):
        if matcher.has_ended:
            break
        if not matcher.advance(token):
            raise InputError("output", token, f"a token that the grammar allows at place {place}")
    return matcher


def allowed_nodes(
    matcher: Matcher, tokens: Sequence[int], next_token: Sequence[int], next_sibling: Sequence[int]
) -> torch.Tensor:
    """bool [N, V]: what may follow each node of a tree whose root was the last token taken.

    Depth first, over first children and next siblings: a token is taken on the way down and given back on the way up,
    so that the matcher stands where it stood. A node that is not allowed, or that ends the output, has everything after
    it allowed: no path goes on there that counts.
    """
    allowed_NV = torch.ones(len(tokens), matcher.vocab_size, dtype=torch.bool)

    def visit(node: int) -> None:
        if matcher.has_ended:
            return
        allowed_NV[node] = matcher.allowed()
        child = next_token[node]
        while child >= 0:
            if matcher.advance(tokens[child]):
                visit(child)
                matcher.roll_back(1)
            child = next_sibling[child]

    visit(0)
    return allowed_NV


def allowed_trees(
    batch: Batch, verify_input: VerifyInput, pools: KVPool, grammars: Grammars
) -> dict[int, torch.Tensor]:
    """bool [N, V] by place in the batch: what may follow the nodes of the tree of every request that has a grammar.

    verify_input: rows behind the batch's are not looked at.
    """
    tables = verify_input.draft_tokens, verify_input.retrieve_next_token, verify_input.retrieve_next_sibling
    links = list(zip(*(table[: batch.size].tolist() for table in tables), strict=True))
    return {
        place: allowed_nodes(after(grammar, _output(pools, row, prompt_len, length + 1)), *links[place])
        for place, grammar, row, prompt_len, length in _constrained(batch, grammars)
    }


def allowed_first(batch: Batch, pools: KVPool, grammars: Grammars) -> dict[int, torch.Tensor]:
    """bool [1, V] by place in the batch: what may follow the chunk of every request that has a grammar, but for chunks
    that end inside the prompt.
    """
    return {
        place: allowed_nodes(after(grammar, _output(pools, row, prompt_len, length)), [-1], [-1], [-1])
        for place, grammar, row, prompt_len, length in _constrained(batch, grammars)
        if length >= prompt_len
    }


def stacked(rows: Mapping[int, torch.Tensor], size: int) -> torch.Tensor | None:
    """bool [B, N, V] of `size` requests, everything allowed to those without rows of their own; None where all are."""
    if not rows:
        return None
    free_NV = torch.ones_like(next(iter(rows.values())))
    return torch.stack([rows.get(place, free_NV) for place in range(size)])


def _constrained(batch: Batch, grammars: Grammars) -> list[tuple[int, Grammar, int, int, int]]:
    """(place, grammar, row of the pool's tables, length of the prompt, L) of every request that has a grammar."""
    columns = batch.request_ids, batch.req_pool_indices, batch.prompt_lens, batch.seq_lens
    requests = zip(*(column.tolist() for column in columns), strict=True)
    return [(place, grammars[key], *own) for place, (key, *own) in enumerate(requests) if key in grammars]


def _output(pools: KVPool, row: int, start: int, end: int) -> list[int]:
    """A request's tokens from the end of its prompt to column end - 1."""
    return pools.token_ids[row, start:end].tolist()
