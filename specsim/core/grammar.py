"""Constrained decoding: the tokens that a grammar allows after each node of a tree.

The state of a request's grammar is a function of its output. So no state is kept between rounds, and a resumed request
continues in the same state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.phases import Batch, VerifyInput
from specsim.core.pool import KVPool
from specsim.core.user_module import time_limit, user_code


class Matcher(Protocol):
    """State of a grammar after one output, changed by its own methods only."""

    vocab_size: int  # V
    has_ended: bool  # the last token ended the output; nothing is called any more

    def allowed(self) -> torch.Tensor:
        """Return the tokens that may follow, bool [V], at least one.

        Where an output may end, its ending token is among them.
        """
        ...

    def advance(self, token: int) -> bool:
        """Append a token, or return False without a change if it is not allowed."""
        ...

    def roll_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        ...


class Grammar(Protocol):
    """An immutable set of allowed outputs."""

    def matcher(self) -> Matcher:
        """Make a matcher in the state before an output's first token."""
        ...


Grammars = Mapping[int, Grammar]  # by request id; a request without one is unconstrained


class Constrained(NamedTuple):
    """A request of a batch that has a grammar."""

    request_id: int
    grammar: Grammar
    row: int  # of the pool's tables
    prompt_len: int
    seq_len: int

    def allowed_nodes(self, pools: KVPool, end: int, tree: tuple[Sequence[int], ...]) -> torch.Tensor:
        """Find the tokens that may follow each node of a tree, after the request's output up to column end - 1.

        InputError names the request whose grammar fails.
        """
        with _grammar_of(self.request_id), time_limit():
            output = pools.token_ids[self.row, self.prompt_len : end].tolist()
            return allowed_nodes(after(self.grammar, output), *tree)


def check(grammars: Grammars, config: SpecConfig, vocab_size: int) -> None:
    """Check that every grammar has the target's vocabulary, and that no threshold accepts drafts of probability 0."""
    allowed = "a number above 0 with a grammar"
    require(not grammars or config.threshold_single > 0, "threshold_single", config.threshold_single, allowed)
    for request_id, grammar in grammars.items():
        with _grammar_of(request_id), time_limit():
            grammar_vocab_size = grammar.matcher().vocab_size
        allowed = f"grammars over the target's {vocab_size} tokens"
        require(grammar_vocab_size == vocab_size, "grammars", f"one over {grammar_vocab_size} tokens", allowed)


@contextmanager
def _grammar_of(request_id: int) -> Iterator[None]:
    """Name the request whose grammar fails or refuses, in an InputError."""
    allowed = "a grammar whose matcher can be made and advanced"
    with user_code("grammars", f"that of request {request_id}", allowed), time_limit():
        try:
            yield
            return
        except InputError as error:
            refused = error
    raise refused.within(f"the grammar of request {request_id}")


def after(grammar: Grammar, output: Sequence[int]) -> Matcher:
    """Make a matcher of an output up to the token that ends it.

    Raises InputError if the grammar forbids the output.
    """
    matcher = grammar.matcher()
    for index, token in enumerate(output):
        if matcher.has_ended:
            break
        require(matcher.advance(token), "output", token, f"a token that the grammar allows at place {index}")
    return matcher


def allowed_nodes(
    matcher: Matcher, tokens: Sequence[int], next_token: Sequence[int], next_sibling: Sequence[int]
) -> torch.Tensor:
    """Find the tokens that may follow each node of a tree, bool [N, V].

    The root is the matcher's last token. The search is depth first, over first children and next siblings: a token is
    appended on the way down and removed on the way up. After a node that is not allowed, or that ends the output, every
    token is allowed: no such path is accepted.
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
    """Find the tokens that may follow each tree node of requests with a grammar.

    Values are bool [N, V] by index in the batch. verify_input may have more rows than the batch; they are not read.
    """
    tokens = verify_input.draft_tokens[: batch.size].tolist()
    next_token = verify_input.retrieve_next_token[: batch.size].tolist()
    next_sibling = verify_input.retrieve_next_sibling[: batch.size].tolist()
    return {
        i: request.allowed_nodes(pools, request.seq_len + 1, (tokens[i], next_token[i], next_sibling[i]))
        for i, request in _constrained(batch, grammars)
    }


def allowed_first(batch: Batch, pools: KVPool, grammars: Grammars) -> dict[int, torch.Tensor]:
    """Find the tokens that may follow the chunks that end a prompt.

    Values are bool [1, V] by index in the batch, for requests with a grammar.
    """
    return {
        i: request.allowed_nodes(pools, request.seq_len, ([-1], [-1], [-1]))
        for i, request in _constrained(batch, grammars)
        if request.seq_len >= request.prompt_len
    }


def stacked(rows: Mapping[int, torch.Tensor], size: int) -> torch.Tensor | None:
    """Stack the masks of `size` requests to bool [B, N, V], None where no request has one.

    A request without a mask gets one that allows every token.
    """
    if not rows:
        return None
    free_NV = torch.ones_like(next(iter(rows.values())))
    return torch.stack([rows.get(index, free_NV) for index in range(size)])


def _constrained(batch: Batch, grammars: Grammars) -> list[tuple[int, Constrained]]:
    """List (index in the batch, request) for the requests that have a grammar."""
    ids = batch.request_ids.tolist()
    lens = zip(batch.req_pool_indices.tolist(), batch.prompt_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    requests = enumerate(zip(ids, lens, strict=True))
    return [(index, Constrained(key, grammars[key], *lengths)) for index, (key, lengths) in requests if key in grammars]
