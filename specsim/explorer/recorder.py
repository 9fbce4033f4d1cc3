"""An engine that keeps the states of every round that it runs."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.grammar import allowed_trees, stacked
from specsim.core.phases import (
    Advance,
    Batch,
    DraftExtendInput,
    DraftInput,
    PrefillInput,
    PrefillOutput,
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
    """An engine whose rounds run phase by phase and are kept in `rounds`."""

    def __init__(self, engine: Engine, most_rounds: int | None = None) -> None:
        self._engine = engine
        self._most_rounds = most_rounds  # rounds that are kept, the first ones; None: all
        self.dtype = engine.dtype
        self.device = engine.device
        self.target = engine.target
        self.drafter = engine.drafter
        self.acceptance = engine.acceptance
        self.rule = engine.rule
        self.grammars = engine.grammars
        self.rounds: list[RecordedStates] = []
        self.num_rounds = 0  # those that are not kept included

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # settings and switches of an engine that has several

    @property
    def config(self) -> SpecConfig:
        return self._engine.config

    @property
    def options(self) -> EngineOptions:
        return self._engine.options

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        return self._engine.make_pools(num_requests, num_slots)

    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        return self._engine.prefill(batch, prefill, pools)

    def hidden_states(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> torch.Tensor:
        return self._engine.hidden_states(batch, prefill, pools)

    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> VerifyInput:
        return self._engine.draft(batch, draft_input, pools, reserved)

    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        return self._engine.verify(batch, verify_input, pools)

    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        return self._engine.draft_extend(batch, draft_extend_input, pools)

    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        """Run a round phase by phase, and keep its states."""
        self.num_rounds += 1
        if self._most_rounds is not None and len(self.rounds) >= self._most_rounds:
            return self._engine.round(batch, draft_input, pools, reserved)
        verify_input = self.draft(batch, draft_input, pools, reserved)
        check_drafts(batch, verify_input, self.dtype)
        drafted_pools = tables(pools)
        allowed = stacked(allowed_trees(batch, verify_input, pools, self.grammars), batch.size)
        verify_output = self.verify(batch, verify_input, pools)
        committed_pools = tables(pools)
        next_draft_input = self.draft_extend(batch, verify_output.draft_extend_input, pools)
        recorded = RecordedStates(
            batch.to("cpu"),
            draft_input.to("cpu"),
            verify_input.to("cpu"),
            verify_output.to("cpu"),
            next_draft_input.to("cpu"),
            drafted_pools,
            committed_pools,
            allowed,
            self.drafter.bonus_columns,
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
