"""An engine that keeps the states of every round that it runs."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from specsim.core.engine import Engine
from specsim.core.grammar import allowed_trees, stacked
from specsim.core.phases import (
    Advance,
    Batch,
    DraftInput,
    RoundOutput,
    VerifyInput,
    VerifyOutput,
    check_drafts,
)
from specsim.core.pool import KVPool


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStates:
    """The states of one round, all on the CPU."""

    batch: Batch  # before the round
    draft_input: DraftInput
    verify_input: VerifyInput
    verify_output: VerifyOutput
    next_draft_input: DraftInput
    drafted_pools: KVPool  # tables of slots and tokens after the draft phase; the KV itself is not kept
    committed_pools: KVPool  # the same after the commit
    allowed: torch.Tensor | None  # bool [B, N, V], tokens that grammars allow after each node
    bonus_columns: int  # of the drafter


class Recorder:
    """An engine whose rounds run phase by phase and are kept in `rounds`; it forwards all other attributes."""

    def __init__(self, engine: Engine, most_rounds: int | None = None) -> None:
        self._engine = engine
        self._most_rounds = most_rounds  # rounds that are kept, the first ones; None: all
        self.rounds: list[RecordedStates] = []
        self.num_rounds = 0  # those that are not kept included

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        """Run a round phase by phase, and keep its states."""
        self.num_rounds += 1
        if self._most_rounds is not None and len(self.rounds) >= self._most_rounds:
            return self._engine.round(batch, draft_input, pools, reserved)
        engine = self._engine
        verify_input = engine.draft(batch, draft_input, pools, reserved)
        check_drafts(batch, verify_input, engine.dtype)
        drafted_pools = tables(pools)
        allowed = stacked(allowed_trees(batch, verify_input, pools, engine.grammars), batch.size)
        verify_output = engine.verify(batch, verify_input, pools)
        committed_pools = tables(pools)
        next_draft_input = engine.draft_extend(batch, verify_output.draft_extend_input, pools)
        recorded = RecordedStates(
            batch.to("cpu"),
            draft_input.to("cpu"),
            verify_input.to("cpu"),
            verify_output.to("cpu"),
            next_draft_input.to("cpu"),
            drafted_pools,
            committed_pools,
            allowed,
            engine.drafter.bonus_columns,
        )
        self.rounds.append(recorded)
        return RoundOutput(verify_input, verify_output, next_draft_input)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round, keep its states, and return what a serving loop needs."""
        return self.round(batch, draft_input, pools, reserved).advance(batch)


def tables(pools: KVPool) -> KVPool:
    """Copy the tables of pools to the CPU; the copy shares the KV buffers, which later rounds write over."""
    copied = copy(pools)
    copied.req_to_token = pools.req_to_token.to("cpu", copy=True)
    copied.token_ids = pools.token_ids.to("cpu", copy=True)
    return copied
