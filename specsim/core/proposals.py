"""Candidates of a batch from a token drafter: what reference and fast share of drafters that run on the host."""

import operator
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.pair import kind_of
from specsim.core.phases import Batch, ExplicitCandidates
from specsim.core.pool import KVPool
from specsim.core.token_drafter import Proposal, TokenDrafter, TreeLimits
from specsim.core.user_module import user_code


class Proposals:
    """A token drafter's proposals for the requests of a batch, for a target of `vocab_size` tokens.

    The tokens of a request are read from the pools, after the first round only those of the last one.
    """

    def __init__(self, drafter: TokenDrafter, config: SpecConfig, vocab_size: int) -> None:
        self._drafter = drafter
        self._limits = TreeLimits(config.num_steps, config.num_draft_tokens - 1, config.topk)
        self._vocab_size = vocab_size
        self._name = f"proposal of {kind_of(drafter)}"
        self._most = config.num_candidates
        self._tokens: dict[int, list[int]] = {}  # by request id, prompt and output so far

    def within(self, config: SpecConfig) -> "Proposals":
        """Make the same drafter's proposals for another setting, with what has been read of requests in common."""
        made = Proposals(self._drafter, config, self._vocab_size)
        made._tokens = self._tokens
        return made

    def candidates(self, batch: Batch, pools: KVPool) -> ExplicitCandidates:
        """Collect the proposals of every request, on the host; a padded request has none.

        Raises InputError for a proposal that is no tree within the limits.
        """
        made = ExplicitCandidates.empty(batch.size, self._most)
        for place, (request_id, tokens) in enumerate(self._read(batch, pools)):
            if not tokens:
                continue
            proposal = self._proposal(request_id, tokens)
            count = self._check(proposal)
            made.tokens[place, :count] = torch.tensor(proposal.tokens, dtype=torch.int64)
            made.parents[place, :count] = torch.tensor(proposal.parents, dtype=torch.int64)
            made.scores[place, :count] = torch.tensor(proposal.scores, dtype=torch.float32)
            made.num_alive[place] = count
        return made

    def forget(self, request_ids: Sequence[int]) -> None:
        """Read all tokens of these requests again in the next round."""
        for request_id in request_ids:
            self._tokens.pop(request_id, None)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Pass the tokens of an ended request to the drafter."""
        self.forget([request_id])
        self._drafter.finish(request_id, tokens, prompt_len)

    def _read(self, batch: Batch, pools: KVPool) -> list[tuple[int, list[int]]]:
        """Read (request id, tokens up to the root) of every request, none of a padded one."""
        width = self._limits.max_depth + 1  # most tokens of one round
        columns = (batch.seq_lens[:, None] + torch.arange(1 - width, 1, device=batch.seq_lens.device)).clamp(min=0)
        recent = pools.token_ids[batch.req_pool_indices.clamp(min=0)[:, None], columns].tolist()
        found = []
        for request_id, (row, length), last in zip(
            batch.request_ids.tolist(), batch.rows_and_lens, recent, strict=True
        ):
            known = self._tokens.get(request_id, [])
            missing = length + 1 - len(known)
            if row < 0:
                known = []
            elif known and 0 <= missing <= width:
                known += last[width - missing :]
            else:
                known = self._tokens[request_id] = pools.token_ids[row, : length + 1].tolist()
            found.append((request_id, known))
        return found

    def _proposal(self, request_id: int, tokens: list[int]) -> Proposal:
        """Ask the drafter, which may return a plain tuple of tokens, parents and scores."""
        found: Any = self._drafter.propose(request_id, tokens, self._limits)
        if not (isinstance(found, tuple) and len(found) == 3):
            raise self._error(type(found).__name__, "a Proposal of tokens, parents and scores")
        with user_code(self._name, type(found).__name__, "lists of token ids, of parents' indices and of scores"):
            tokens, parents, scores = (values[: len(values)] for values in found)  # no endless iterators
            return Proposal([*map(operator.index, tokens)], [*map(operator.index, parents)], [*map(float, scores)])

    def _check(self, proposal: Proposal) -> int:
        """Count the candidates of a proposal, after a check that they form a tree within the limits."""
        tokens, parents, scores = proposal
        count = len(tokens)
        if not count == len(parents) == len(scores):
            counts = f"{count} tokens, {len(parents)} parents, {len(scores)} scores"
            raise self._error(counts, "as many parents and scores as tokens")
        if count > self._most:
            raise self._error(f"{count} candidates", f"at most {self._most} with this topk and num_steps")
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

    def _error(self, found: str, allowed: str) -> InputError:
        return InputError(self._name, found, allowed)
