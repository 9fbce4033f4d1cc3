"""A draft phase that lays finished drafts out as lanes: all lanes of a depth have the same children."""

from copy import copy
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, State
from specsim.core.pool import KVPool
from specsim.core.product import ProductInput
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import Lanes, expand, start_lanes
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel

AnyDrafts = TypeVar("AnyDrafts", bound=ProductInput)


@kernel
@no_type_check
def _children_kernel(
    step_ptr,
    topk_scores_ptr,
    topk_index_ptr,
    scores_ptr,
    tokens_ptr,
    num_children,
    topk,
    per_lane,
    num_steps,
    SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the drafts of the next depth to every lane: all K of them, or the lane's own sampled one."""
    await_input(PDL)
    depth = tl.minimum(tl.load(step_ptr) + 1, num_steps - 1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < num_children
    lane = offs // per_lane % topk
    request = offs // (per_lane * topk)
    entry = (request * num_steps + depth) * topk + (lane if SAMPLED else offs % per_lane)
    tl.store(scores_ptr + offs, tl.load(topk_scores_ptr + entry, mask=mask), mask=mask)
    tl.store(tokens_ptr + offs, tl.load(topk_index_ptr + entry, mask=mask), mask=mask)


def children(
    step: torch.Tensor, topk_scores_BSK: torch.Tensor, topk_index_BSK: torch.Tensor, config: SpecConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every lane the drafts of the next depth: (scores, ids), [B, K, K].

    The step's number is read on the device.

    A lane of sampled drafts has one child, [B, K, 1].
    """
    size, num_steps, topk = topk_index_BSK.shape
    per_lane = 1 if config.is_sampled else topk
    scores = topk_scores_BSK.new_empty(size, topk, per_lane)
    tokens = topk_index_BSK.new_empty(size, topk, per_lane)
    block = block_of(tokens.numel(), 256)
    _children_kernel[(ceil_div(tokens.numel(), block),)](
        step_ptr=step,
        topk_scores_ptr=topk_scores_BSK,
        topk_index_ptr=topk_index_BSK,
        scores_ptr=scores,
        tokens_ptr=tokens,
        num_children=tokens.numel(),
        topk=topk,
        per_lane=per_lane,
        num_steps=num_steps,
        SAMPLED=config.is_sampled,
        BLOCK=block,
    )
    return scores, tokens


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

    def propose(self, batch: Batch, draft_input: ProductInput, pools: KVPool) -> Candidates:
        """Lay the drafts out as candidates, without a forward."""
        buffers = self.buffers(batch.size).to(self._device)
        self.start(batch, draft_input, buffers, pools)
        for _ in range(self._config.num_steps - 1):
            self.step(batch, buffers, pools)
        return buffers.candidates

    def start(self, batch: Batch, draft_input: ProductInput, buffers: ProductBuffers, pools: KVPool) -> None:
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
