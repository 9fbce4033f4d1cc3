"""Constrained decoding: which tokens may follow, asked at the nodes of a tree.

A request's grammar says of its output, token by token, what may come next. Where it stands is a function of the tokens
that the request has, so nothing has to be kept of it between rounds, and a resumed request stands where it stood.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from specsim.config import InputError, SpecConfig
from specsim.phases import Batch, VerifyInput
from specsim.pool import KVPool


class Matcher(Protocol):
    """Where one output stands in its grammar; changed by its own verbs only.

    vocab_size: V. has_ended: whether the last token ended the output, after which nothing is asked any more.
    """

    vocab_size: int
    has_ended: bool

    def allowed(self) -> torch.Tensor:
        """bool [V]: the tokens that may follow, at least one; the one that ends outputs where it may end here."""

    def advance(self, token: int) -> bool:
        """Take a token; False, and nothing has changed, if it is not allowed."""

    def roll_back(self, count: int) -> None:
        """Give the last `count` tokens back."""


class Grammar(Protocol):
    """What outputs are allowed. It does not change."""

    def matcher(self) -> Matcher:
        """A new one, before the first token of an output."""


Grammars = Mapping[int, Grammar]  # by request id; a request that has none is free


def check(grammars: Grammars, config: SpecConfig) -> None:
    """InputError for a setting that takes drafts whatever their probability, and so could leave the grammar."""
    if grammars and config.threshold_single == 0:
        raise InputError("threshold_single", config.threshold_single, "a number above 0 with a grammar")


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
    batch: Batch, verify_input: VerifyInput, pools: KVPool, grammars: Grammars, vocab_size: int
) -> torch.Tensor | None:
    """bool [B, N, V]: what may follow the nodes of every request's tree; None where no request has a grammar."""
    tables = verify_input.draft_tokens, verify_input.retrieve_next_token, verify_input.retrieve_next_sibling
    links = zip(*(table.tolist() for table in tables), strict=True)
    rows = {}
    for request, (grammar, own) in enumerate(zip(_of_batch(batch, grammars), links, strict=True)):
        if grammar is not None:
            output = _output(batch, request, int(batch.seq_lens[request]) + 1, pools)
            rows[request] = allowed_nodes(after(grammar, output), *own)
    return _stacked(rows, torch.ones(*verify_input.draft_tokens.shape, vocab_size, dtype=torch.bool))


def allowed_first(batch: Batch, pools: KVPool, grammars: Grammars, vocab_size: int) -> torch.Tensor | None:
    """bool [B, V]: what may follow each request's chunk; everything where the chunk ends inside the prompt."""
    rows = {}
    for request, grammar in enumerate(_of_batch(batch, grammars)):
        length = int(batch.seq_lens[request])
        if grammar is not None and length >= int(batch.prompt_lens[request]):
            matcher = after(grammar, _output(batch, request, length, pools))
            rows[request] = allowed_nodes(matcher, [-1], [-1], [-1])[0]
    return _stacked(rows, torch.ones(batch.size, vocab_size, dtype=torch.bool))


def _of_batch(batch: Batch, grammars: Grammars) -> list[Grammar | None]:
    return [grammars.get(request_id) for request_id in batch.request_ids.tolist()]


def _output(batch: Batch, request: int, count: int, pools: KVPool) -> list[int]:
    """The request's tokens from the end of its prompt to column count - 1."""
    row, start = int(batch.req_pool_indices[request]), int(batch.prompt_lens[request])
    return pools.token_ids[row, start:count].tolist()


def _stacked(rows: Mapping[int, torch.Tensor], allowed: torch.Tensor) -> torch.Tensor | None:
    if not rows:
        return None
    for request, own in rows.items():
        allowed[request] = own
    return allowed
