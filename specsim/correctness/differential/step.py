"""One step of a cell and each of its requests: inputs and outputs of the implementations."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.phases import Batch, DraftExtendInput, VerifyInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.correctness.differential.comparison import FieldChecks, Trio
from specsim.correctness.differential.implementation import Implementation

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A phase under comparison, or a whole round that ran as one graph."""

    batch: Batch
    implementations: Trio[Implementation]  # after the step
    entered: Trio[Any]  # states that the step read
    outputs: dict[str, Trio[Any]]  # states that the step returned, by phase, on the host
    pools_before: KVPool | None  # of the fast implementation, on its device; None: its writes are not compared
    tables_before: KVPool  # pools of the reference, for their tables
    draft_ids: torch.Tensor  # i64 [V], draft id of every target id, -1 for none
    check: FieldChecks

    @property
    def config(self) -> SpecConfig:
        return self.implementations.reference.engine.config

    @property
    def drafter(self) -> Drafter:
        """The reference's drafter."""
        return self.implementations.reference.engine.drafter

    @property
    def pools(self) -> Trio[KVPool]:
        """Pools after the step, those of the fast implementation on its device."""
        return self.implementations.map(lambda implementation: implementation.pools)

    @property
    def last(self) -> str:
        """The phase that the step ended with."""
        return [*self.outputs][-1]

    @property
    def drafted(self) -> Trio[KVBuffer | None]:
        """Draft KV after the draft phase: a snapshot where draft-extend has overwritten it since."""
        kv = self.pools.map(lambda pools: pools.draft)
        return kv if self.last == "draft" else kv.map(lambda buffer: buffer and buffer.snapshot)

    @property
    def trees(self) -> Trio[VerifyInput]:
        """Trees that the step verified."""
        return self.outputs.get("draft", self.entered)

    @property
    def extend_input(self) -> DraftExtendInput | None:
        """Accepted rows of the reference, None before there are any."""
        if "verify" in self.outputs:
            return self.outputs["verify"].reference.draft_extend_input
        return self.entered.reference if "draft_extend" in self.outputs else None


@dataclass(frozen=True, slots=True)
class ComparedRequest(Generic[S]):
    """One request of a step, and the states in which it is compared."""

    step: ComparedStep
    index: int  # place in the batch
    states: Trio[S]  # that a phase left, of all requests

    def of(self, states: Trio[R]) -> "ComparedRequest[R]":
        """Give the same request in other states."""
        return ComparedRequest(self.step, self.index, states)

    def field(self, name: str) -> Trio[Any]:
        """The request's entry of a field that has one entry a request, None where a state lacks the field."""
        values = self.states.map(lambda state: getattr(state, name))
        return values.map(lambda value: None if value is None else value[self.index])

    def slots(self, columns: torch.Tensor) -> torch.Tensor:
        """Slots that the reference's table gives these columns."""
        return self.step.pools.reference.slots(self.row, columns)

    def is_dropped(self, depth: int) -> bool:
        """Whether lanes of this depth stand at or beyond max_len, where they propose nothing.

        Lanes without KV of their own all stand at the root.
        """
        drafter = self.step.drafter
        return (
            drafter.kv_layout is not None
            and self.length + drafter.bonus_columns + depth - 1 >= self.config.length_limit
        )

    @property
    def config(self) -> SpecConfig:
        return self.step.config

    @property
    def check(self) -> FieldChecks:
        return self.step.check

    @property
    def batch(self) -> Batch:
        """The batch that has only this request."""
        return self.step.batch.filter(torch.tensor([self.index]))

    @property
    def temperature(self) -> float:
        return float(self.step.batch.sampling.temperature[self.index])

    @property
    def row(self) -> int:
        """Row of the pools' tables."""
        return int(self.step.batch.req_pool_indices[self.index])

    @property
    def length(self) -> int:
        """L before the step."""
        return int(self.step.batch.seq_lens[self.index])

    @property
    def num_accepted_tokens(self) -> int:
        rows = self.step.extend_input
        return 0 if rows is None else int(rows.num_accepted_tokens[self.index])

    @property
    def end(self) -> int:
        """L after the round: every column before it is committed."""
        return self.length + self.num_accepted_tokens

    @property
    def nodes(self) -> slice:
        """Its rows of a field that is flattened over requests and nodes."""
        num_nodes = self.config.num_draft_tokens
        return slice(self.index * num_nodes, (self.index + 1) * num_nodes)
