"""An engine that switches settings between rounds, for serving and the checks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require
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
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.target import Target

MakeEngine = Callable[[SpecConfig, Engine | None], Any]  # of a setting, with the models of another engine


class AdaptiveEngine:
    """An engine with a setting for every round, of an ordered set.

    Each setting has an engine of its own, with its own buffers and graphs, over the same models and the same pools. All
    of them take and leave the draft state of the widest setting, which has the most lanes and steps. So a round of any
    setting can follow a round of any other one, and a switch moves nothing.
    """

    rule: AcceptanceRule | None = None

    def __init__(self, make: MakeEngine, settings: Settings, acceptance: SyntheticAcceptance | None = None) -> None:
        self._widest_engine: Engine = make(settings.widest, None)
        self._engines: tuple[Engine, ...] = tuple(make(config, self._widest_engine) for config in settings)
        self.settings = Settings(tuple(engine.config for engine in self._engines))
        self.acceptance = acceptance  # as given, with a rate for each of the most steps
        self.current = 0  # number of the setting of the next round
        self.dtype: torch.dtype = self._widest_engine.dtype
        self.device: torch.device = self._widest_engine.device
        self.target: Target = self._widest_engine.target
        self.drafter: Drafter = self._widest_engine.drafter
        self.grammars: Grammars = self._widest_engine.grammars

    @property
    def config(self) -> SpecConfig:
        """The setting of the next round."""
        return self.settings[self.current]

    @property
    def options(self) -> EngineOptions:
        """The options of the next round's engine, as graph modes depend on the setting."""
        return self._engine.options

    def switch(self, number: int) -> None:
        """Run the following rounds under the setting of that number."""
        require(0 <= number < len(self.settings), "setting", number, f"0 to {len(self.settings) - 1}")
        self.current = number

    @property
    def _engine(self) -> Engine:
        return self._engines[self.current]

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        """Make empty pools whose tables hold the most columns that a setting reserves."""
        return self._widest_engine.make_pools(num_requests, num_slots)

    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt, and make the draft state of all settings."""
        return self._widest_engine.prefill(batch, prefill, pools)

    def hidden_states(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> torch.Tensor:
        return self._widest_engine.hidden_states(batch, prefill, pools)

    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        return self._engine.round(batch, draft_input, pools, reserved)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        return self._engine.advance(batch, draft_input, pools, reserved)

    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> VerifyInput:
        return self._engine.draft(batch, draft_input, pools, reserved)

    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        return self._engine.verify(batch, verify_input, pools)

    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        return self._engine.draft_extend(batch, draft_extend_input, pools)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        self._widest_engine.finish(request_id, tokens, prompt_len)
