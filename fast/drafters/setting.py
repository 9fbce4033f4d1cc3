"""A drafter whose rounds have another setting than its states, on static buffers."""

from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, State
from specsim.core.pool import KVPool
from specsim.core.setting_drafter import SettingDrafter
from specsim.fast.drafters.steps import StepDrafter


class SettingStepDrafter(SettingDrafter):
    """Two step drafters of the same weights: the carrier's draft inputs, the proposer's buffers and steps."""

    def under(self, config: SpecConfig) -> StepDrafter:
        return self._carrier.under(config)

    def zeros(self, size: int) -> DraftInput:
        return self._carrier.zeros(size)

    def buffers(self, size: int) -> State:
        return self._proposer.buffers(size)

    def start(self, batch: Batch, draft_input: DraftInput, buffers: State, pools: KVPool) -> None:
        """Start the draft phase of this setting with the part of the state that it needs."""
        self._proposer.start(batch, self._narrowed(draft_input), buffers, pools)

    def step(self, batch: Batch, buffers: State, pools: KVPool) -> None:
        self._proposer.step(batch, buffers, pools)

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: Any = None
    ) -> DraftInput:
        """Make the carrier's state after verify, in `out` where it is given."""
        return self._carrier.extend(batch, draft_extend_input, pools, out=out)
