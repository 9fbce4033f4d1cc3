"""A draft phase that lays finished drafts out as lanes: all lanes of a depth have the same children."""

from copy import copy
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import torch

from specsim.core.config import SpecConfig
from specsim.core.mtp import MtpInput
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, State
from specsim.core.pool import KVPool
from specsim.fast.drafters.mtp_drafts import children
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import Lanes, expand, start_lanes

AnyDrafts = TypeVar("AnyDrafts", bound=MtpInput)


@dataclass(frozen=True, slots=True)
class ProductBuffers(State):
    """Buffers of a draft phase that lays finished drafts out as lanes."""

    lanes: Lanes  # with one entry of 0 as hidden state
    topk_scores: torch.Tensor  # f32 [B, S, K], of the draft input
    topk_index: torch.Tensor  # i64 [B, S, K], of the draft input

    @property
    def candidates(self) -> Candidates:
        """The candidates that the lanes have proposed so far."""
        return self.lanes.candidates


class DraftShape(NamedTuple):
    """Sizes and dtype of a drafter's states."""

    hidden_size: int
    vocab_size: int  # of the target
    dtype: torch.dtype


class ProductDrafter(StepDrafter, Generic[AnyDrafts]):
    """The draft phase of a drafter whose draft inputs, of type `state`, hold finished drafts."""

    def __init__(self, state: type[AnyDrafts], shape: DraftShape, config: SpecConfig, device: torch.device) -> None:
        self._state = state
        self._shape = shape
        self._config = config
        self._device = device

    def propose(self, batch: Batch, draft_input: MtpInput, pools: KVPool) -> Candidates:
        """Lay the drafts out as candidates, without a forward."""
        buffers = self.buffers(batch.size).to(self._device)
        self.start(batch, draft_input, buffers, pools)
        for _ in range(self._config.num_steps - 1):
            self.step(batch, buffers, pools)
        return buffers.candidates

    def start(self, batch: Batch, draft_input: MtpInput, buffers: ProductBuffers, pools: KVPool) -> None:
        """Copy the drafts, and start the lanes with the root's children."""
        config = self._config
        buffers.topk_scores.copy_(draft_input.topk_scores)
        buffers.topk_index.copy_(draft_input.topk_index)
        draft_prob = draft_input.draft_prob
        first = AutoregressiveInput(
            bonus_tokens=draft_input.bonus_tokens,
            topk_scores=draft_input.topk_scores[:, 0].clone(memory_format=torch.contiguous_format),
            topk_index=draft_input.topk_index[:, 0].clone(memory_format=torch.contiguous_format),
            hidden=buffers.lanes.hidden[:, 0].clone(memory_format=torch.contiguous_format),
            draft_prob=None if draft_prob is None else draft_prob[:, 0],
        )
        start_lanes(first, config, out=buffers.lanes)
        tree_prob = buffers.candidates.draft_prob
        if draft_prob is not None and tree_prob is not None:  # one distribution for each node that has children
            deeper = tree_prob[:, 1:].unflatten(1, (config.num_steps - 1, config.topk))
            deeper.copy_(draft_prob[:, 1:, None].expand_as(deeper))

    def step(self, batch: Batch, buffers: ProductBuffers, pools: KVPool) -> None:
        """Add the next depth's drafts below every lane."""
        lanes = buffers.lanes
        scores, tokens = children(lanes.step, buffers.topk_scores, buffers.topk_index, self._config)
        expand(lanes, scores, tokens, lanes.hidden, self._config)

    def zeros(self, size: int) -> AnyDrafts:
        """Make the draft input of `size` padded requests, on the host."""
        shape = self._shape
        return self._state.zeros(size, self._config, shape.hidden_size, shape.dtype, shape.vocab_size)

    def buffers(self, size: int) -> ProductBuffers:
        """Make the buffers of `size` padded requests, on the host."""
        lanes = Lanes.padded(size, 1, self._config, self._shape.dtype, self._shape.vocab_size)
        drafts = self.zeros(size)
        return ProductBuffers(lanes, drafts.topk_scores, drafts.topk_index)

    def with_config(self, config: SpecConfig) -> Self:
        drafter = copy(self)
        drafter._config = config
        return drafter
