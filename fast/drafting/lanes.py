"""Lanes of a draft phase: the paths that the drafter extends by one token in each step."""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Candidates, ExplicitCandidates, State
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous

_HIDDEN_BLOCK = 256


class LaneTables(NamedTuple):
    """Lanes as kernel arguments."""

    step_ptr: torch.Tensor
    lane_tokens_ptr: torch.Tensor
    path_ptr: torch.Tensor
    hidden_ptr: torch.Tensor
    tokens_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    parent_list_ptr: torch.Tensor


@dataclass(frozen=True, slots=True)
class CandidateBuffers(State):
    """Buffers of a draft phase that leaves nothing but candidates."""

    candidates: Candidates | ExplicitCandidates

    @property
    def explicit(self) -> ExplicitCandidates:
        """The candidates of a drafter that gives each its parent."""
        if not isinstance(self.candidates, ExplicitCandidates):
            raise TypeError("the candidates have no explicit parents")
        return self.candidates


@dataclass(frozen=True, slots=True)
class Lanes(State):
    """Buffers of the draft loop, which every step changes in place."""

    step: torch.Tensor  # i32 [2], step of the loop, and programs of a launch that are done with it (0 between launches)
    tokens: torch.Tensor  # i64 [B, K], each lane's last token, best lane first
    path: torch.Tensor  # i32 [B, K, S], lane that holds lane k's token of each step, -1 for steps to come
    hidden: torch.Tensor  # [B, K, H]
    candidates: Candidates  # all proposed so far; a step's lanes are those in its block of parent_list

    @classmethod
    def empty(
        cls,
        batch_size: int,
        hidden_size: int,
        config: SpecConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        vocab_size: int = 0,
    ) -> Self:
        """Allocate buffers, which `start_lanes` fills.

        vocab_size: of draft distributions.
        """
        k = config.topk
        num_steps = config.num_steps
        draft_prob = None

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        if config.has_draft_prob:
            draft_prob = buffer(batch_size, config.num_parents, vocab_size, dtype=torch.float32)
        return cls(
            step=buffer(2, dtype=torch.int32),
            tokens=buffer(batch_size, k),
            path=buffer(batch_size, k, num_steps, dtype=torch.int32),
            hidden=buffer(batch_size, k, hidden_size, dtype=dtype),
            candidates=Candidates(
                tokens=buffer(batch_size, config.num_candidates),
                scores=buffer(batch_size, config.num_candidates, dtype=torch.float32),
                parent_list=buffer(batch_size, max(1, k * (num_steps - 1) + 1)),
                draft_prob=draft_prob,
            ),
        )

    @classmethod
    def padded(cls, size: int, hidden_size: int, config: SpecConfig, dtype: torch.dtype, vocab_size: int) -> Self:
        """Make lanes of padded requests on the host, as earlier steps would leave them for a captured step."""
        lanes = cls.empty(size, hidden_size, config, dtype, "cpu", vocab_size)
        for buffer in lanes.tables:
            buffer.zero_()
        lanes.candidates.parent_list.fill_(-1)
        return lanes

    @property
    def tables(self) -> LaneTables:
        grown = self.candidates
        return LaneTables(self.step, self.tokens, self.path, self.hidden, grown.tokens, grown.scores, grown.parent_list)


def hidden_block(hidden_size: int, on_gpu: int = _HIDDEN_BLOCK) -> int:
    """Count the entries of the hidden state that one program copies."""
    return min(next_power_of_2(hidden_size), block_of(hidden_size, on_gpu))


@kernel
@no_type_check
def _start_kernel(
    topk_scores_ptr,
    topk_index_ptr,
    hidden_ptr,
    lane_ptrs,
    num_lanes,
    num_candidates,
    k,
    num_steps,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Start the lanes of all requests.

    Programs of one row block share the copy of the hidden state.
    """
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request = rows // k
    lane = rows % k
    mask = rows < num_lanes
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask_hidden = mask & (offs < HIDDEN)
    hidden = tl.load(hidden_ptr + request * HIDDEN + offs, mask=mask_hidden)
    tl.store(lane_ptrs.hidden_ptr + rows * HIDDEN + offs, hidden, mask=mask_hidden)
    if tl.program_id(1) == 0:
        if tl.program_id(0) == 0:
            tl.store(lane_ptrs.step_ptr, 0)
            tl.store(lane_ptrs.step_ptr + 1, 0)
        tokens = tl.load(topk_index_ptr + rows, mask=mask)
        scores = tl.load(topk_scores_ptr + rows, mask=mask)
        tl.store(lane_ptrs.lane_tokens_ptr + rows, tokens, mask=mask)
        candidate = request * num_candidates + lane
        tl.store(lane_ptrs.tokens_ptr + candidate, tokens, mask=mask)
        tl.store(lane_ptrs.scores_ptr + candidate, scores, mask=mask)
        steps = tl.arange(0, STEPS)[None, :]
        held_by = tl.where(steps == 0, lane, -1).to(tl.int32)
        tl.store(lane_ptrs.path_ptr + rows * num_steps + steps, held_by, mask=mask & (steps < num_steps))
        block = request * (k * (num_steps - 1) + 1)
        tl.store(lane_ptrs.parent_list_ptr + block, -1, mask=mask & (lane == 0))
        tl.store(lane_ptrs.parent_list_ptr + block + 1 + lane, lane, mask=mask & (num_steps > 1))


def start_lanes(draft_input: AutoregressiveInput, config: SpecConfig, *, out: Lanes | None = None) -> Lanes:
    """Start with the root's children as lanes, each with the root's hidden state and distribution."""
    hidden = draft_input.hidden
    draft_prob = draft_input.draft_prob
    if config.has_draft_prob and draft_prob is None:
        raise ValueError("the draft input has no draft_prob, which this setting's verifier reads")
    require_contiguous(topk_scores=draft_input.topk_scores, topk_index=draft_input.topk_index, hidden=hidden)
    batch_size, hidden_size = hidden.shape
    k = config.topk
    vocab_size = 0 if draft_prob is None else draft_prob.shape[1]
    lanes = out or Lanes.empty(batch_size, hidden_size, config, hidden.dtype, hidden.device, vocab_size)
    block = hidden_block(hidden_size)
    rows = block_of(batch_size * k, 16, max(block, config.num_steps))
    _start_kernel[(ceil_div(batch_size * k, rows), ceil_div(hidden_size, block))](
        topk_scores_ptr=draft_input.topk_scores,
        topk_index_ptr=draft_input.topk_index,
        hidden_ptr=hidden,
        lane_ptrs=lanes.tables,
        num_lanes=batch_size * k,
        num_candidates=config.num_candidates,
        k=k,
        num_steps=config.num_steps,
        ROWS=rows,
        STEPS=next_power_of_2(config.num_steps),
        HIDDEN=hidden_size,
        BLOCK=block,
    )
    if lanes.candidates.draft_prob is not None and draft_prob is not None:
        lanes.candidates.draft_prob[:, 0].copy_(draft_prob)
    return lanes
