"""The engine protocol: everything that a serving loop or a check calls."""

from collections.abc import Sequence
from typing import Protocol

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.engine_options import EngineOptions
from specsim.core.grammar import Grammars
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
)
from specsim.core.pool import KVPool
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.target import Target


class Engine(Protocol):
    """Rounds of one pair under one setting.

    Each phase is f(batch, state, pools) -> state; only the pools change.
    """

    dtype: torch.dtype
    device: torch.device
    target: Target
    drafter: Drafter
    acceptance: SyntheticAcceptance | None  # decides how many drafts a round accepts, where given
    rule: AcceptanceRule | None  # verifies in place of the setting's verifier, where given
    grammars: Grammars  # constraints of requests by their ids

    @property
    def config(self) -> SpecConfig:
        """The setting, or of an engine that switches the one of the next round."""
        ...

    @property
    def options(self) -> EngineOptions:
        """The options of the engine that runs the next round."""
        ...

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        """Make empty pools for up to `num_requests` requests and `num_slots` slots (rounded down to whole pages)."""
        ...

    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt, which batch.seq_lens counts.

        Columns up to seq_lens, and those that the drafter needs ahead, must be owned.
        """
        ...

    def hidden_states(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> torch.Tensor:
        """Run a chunk of every prompt, and return the hidden states between the target's n layers, [R, (n + 1)·H].

        They are what enters each layer, then what the head reads, to find the layer of an error. Only the target's KV
        is written.
        """
        ...

    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        """Run one speculative round, after which the batch has seq_lens + num_accepted_tokens."""
        ...

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round and return only what a serving loop needs."""
        ...

    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> VerifyInput:
        """Propose candidates and build trees of the best of them at columns L..L+N-1."""
        ...

    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        """Run the target over the trees, verify the drafts, and commit the accepted path."""
        ...

    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Rewrite the drafter's KV of the accepted rows from the target's features, and make the next DraftInput."""
        ...

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Note that a request has ended with these tokens, its prompt_len prompt tokens first."""
        ...
