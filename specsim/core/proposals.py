"""Drafter of an engine that asks a token drafter on the host, alone or next to another drafter."""

import operator
from collections.abc import Callable, Sequence
from copy import copy
from math import isfinite
from typing import Any, Self

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.errors import InputError
from specsim.core.pair import AnyDrafter, Pair, check_drafter, kind_of
from specsim.core.phases import Batch, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.token_drafter import Proposal, TokenDrafter, TreeLimits
from specsim.core.user_module import user_code


class ProposalDrafter(Drafter):
    """A token drafter as a drafter of an engine, for a target of `vocab_size` tokens, on the host.

    The tokens of a request are read from the pools, after the first round only those of the last one.
    """

    runs_on_host = True

    def __init__(self, drafter: TokenDrafter, config: SpecConfig, vocab_size: int) -> None:
        self.token_drafter = drafter
        self._vocab_size = vocab_size
        self._name = f"proposal of {kind_of(drafter)}"
        self._tokens: dict[int, list[int]] = {}  # by request id, prompt and output so far
        self._set_limits(config)

    def _set_limits(self, config: SpecConfig) -> None:
        self._limits = TreeLimits(config.num_steps, config.num_draft_tokens - 1, config.topk)
        self._num_candidates = config.num_candidates

    def with_config(self, config: SpecConfig) -> Self:
        """Make the same drafter under another setting, with what has been read of requests in common."""
        drafter = copy(self)
        drafter._set_limits(config)
        return drafter

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Forget what was read of these requests before."""
        self.forget(batch)
        return super().seed(batch, prefill, next_tokens, features_RF, pools)

    def forget(self, batch: Batch) -> None:
        """Forget what was read of these requests before, as another run may use the same ids."""
        for request_id in batch.request_ids.tolist():
            self._tokens.pop(request_id, None)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        return self.look_up(batch, pools)

    def look_up(self, batch: Batch, pools: KVPool) -> ExplicitCandidates:
        """Collect the proposals of every request, on the host; a padded request has none.

        Raises InputError for a proposal that is no tree within the limits.
        """
        candidates = ExplicitCandidates.empty(batch.size, self._num_candidates)
        for index, (request_id, tokens) in enumerate(self._read(batch, pools)):
            if not tokens:
                continue
            proposal = self._proposal(request_id, tokens)
            count = self._check(proposal)
            candidates.tokens[index, :count] = torch.tensor(proposal.tokens, dtype=torch.int64)
            candidates.parents[index, :count] = torch.tensor(proposal.parents, dtype=torch.int64)
            candidates.scores[index, :count] = torch.tensor(proposal.scores, dtype=torch.float32)
            candidates.num_alive[index] = count
        return candidates

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Pass the tokens of an ended request to the drafter."""
        self._tokens.pop(request_id, None)
        self.token_drafter.finish(request_id, tokens, prompt_len)

    def _read(self, batch: Batch, pools: KVPool) -> list[tuple[int, list[int]]]:
        """Read (request id, tokens up to the root) of every request, none of a padded one."""
        width = self._limits.max_depth + 1  # most tokens of one round
        columns = (batch.seq_lens[:, None] + torch.arange(1 - width, 1, device=batch.seq_lens.device)).clamp(min=0)
        recent = pools.token_ids[batch.req_pool_indices.clamp(min=0)[:, None], columns].tolist()
        contexts = []
        for request_id, (row, length), last in zip(
            batch.request_ids.tolist(), batch.rows_and_lens, recent, strict=True
        ):
            tokens = self._tokens.get(request_id, [])
            missing = length + 1 - len(tokens)
            if row < 0:
                tokens = []
            elif tokens and 0 <= missing <= width:
                tokens += last[width - missing :]
            else:
                tokens = self._tokens[request_id] = pools.token_ids[row, : length + 1].tolist()
            contexts.append((request_id, tokens))
        return contexts

    def _proposal(self, request_id: int, tokens: list[int]) -> Proposal:
        """Ask the drafter, which may return a plain tuple of tokens, parents and scores."""
        proposal: Any = self.token_drafter.propose(request_id, tokens, self._limits)
        if not (isinstance(proposal, tuple) and len(proposal) == 3):
            raise self._error(type(proposal).__name__, "a Proposal of tokens, parents and scores")
        with user_code(self._name, type(proposal).__name__, "lists of token ids, of parents' indices and of scores"):
            tokens, parents, scores = (values[: len(values)] for values in proposal)  # no endless iterators
            return Proposal([*map(operator.index, tokens)], [*map(operator.index, parents)], [*map(float, scores)])

    def _check(self, proposal: Proposal) -> int:
        """Count the candidates of a proposal, after a check that they form a tree within the limits."""
        tokens, parents, scores = proposal
        count = len(tokens)
        if not count == len(parents) == len(scores):
            counts = f"{count} tokens, {len(parents)} parents, {len(scores)} scores"
            raise self._error(counts, "as many parents and scores as tokens")
        if count > self._num_candidates:
            raise self._error(f"{count} candidates", f"at most {self._num_candidates} with this topk and num_steps")
        depths: list[int] = []
        children: dict[int, set[int]] = {}
        for index, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True)):
            if not 0 <= token < self._vocab_size:
                raise self._error(f"token {token}", f"token ids of the target, 0 to {self._vocab_size - 1}")
            if not -1 <= parent < index:
                raise self._error(f"parent {parent} of candidate {index}", "-1 or the index of an earlier candidate")
            if not isfinite(score):
                raise self._error(f"score {score}", "finite scores")
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            siblings = children.setdefault(parent, set())
            if token in siblings:
                raise self._error(f"token {token} twice below candidate {parent}", "siblings with distinct tokens")
            siblings.add(token)
        if max(depths, default=0) > self._limits.max_depth:
            raise self._error(f"depth {max(depths)}", f"at most num_steps, {self._limits.max_depth}")
        if max(map(len, children.values()), default=0) > self._limits.topk:
            raise self._error(f"{max(map(len, children.values()))} siblings", f"at most topk, {self._limits.topk}")
        return count

    def _error(self, value: str, allowed: str) -> InputError:
        return InputError(self._name, value, allowed)


def make_lookup(pair: Pair, make: Callable[[AnyDrafter], Drafter], config: SpecConfig) -> ProposalDrafter | None:
    """Make the lookup of a pair's engine; None without one, and in plain decoding."""
    if pair.lookup is None or config.is_plain:
        return None
    check_drafter(pair.lookup, config)
    drafter = make(pair.lookup)
    assert isinstance(drafter, ProposalDrafter)
    return drafter
