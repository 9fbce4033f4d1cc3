"""Synthetic acceptance in one program for each request: the scheduled number of drafts, and the path."""

from dataclasses import dataclass
from typing import Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.uniforms import seed_bits
from specsim.fast.acceptance import PathTables, store_path
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2, require_contiguous
from specsim.fast.runtime.uniforms import SYNTHETIC, word


@dataclass(frozen=True, slots=True)
class SyntheticSchedule:
    """A SyntheticAcceptance on a device."""

    seed: torch.Tensor  # i64 [1]
    shares: torch.Tensor  # i64 [S], in units of 1/2²⁴
    is_independent: bool

    @classmethod
    def of(cls, acceptance: SyntheticAcceptance, device: torch.device | str) -> Self:
        seed = torch.tensor([seed_bits(acceptance.seed)], dtype=torch.int64, device=device)
        shares = torch.tensor(acceptance.shares, dtype=torch.int64, device=device)
        return cls(seed, shares, acceptance.schedule == "independent")


@triton.jit
@no_type_check
def _scheduled(seed, request_id, length, shares_ptr, num_steps):
    """Count the accepted drafts of schedule `independent`."""
    zero = tl.full((), 0, tl.int32)
    uniform = word(seed, request_id, SYNTHETIC, length, zero, zero)
    drafts = 0
    for position in range(num_steps):
        drafts += (uniform < tl.load(shares_ptr + position)).to(tl.int32)
    return drafts


@triton.jit
@no_type_check
def _spread(seed, request_id, num_rounds, shares_ptr, num_steps):
    """Count the accepted drafts of schedule `minimum-variance` in the round after num_rounds."""
    zero = tl.full((), 0, tl.int32)
    before = num_rounds
    after = num_rounds + 1
    drafts = zero.to(tl.int64)
    for position in range(num_steps):
        share = tl.load(shares_ptr + position)
        phase = word(seed, request_id, SYNTHETIC, zero, zero + position, zero).to(tl.int64)
        before = (before * share + phase) >> 24
        after = (after * share + phase) >> 24
        drafts += after - before
    return drafts.to(tl.int32)


@kernel
@no_type_check
def _follow_kernel(
    positions_ptr,
    parents_ptr,
    request_ids_ptr,
    seq_lens_ptr,
    num_rounds_ptr,
    seed_ptr,
    shares_ptr,
    path_ptrs,
    rejected_ptr,
    num_nodes,
    num_steps,
    max_len,
    INDEPENDENT: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the path to the first node at the depth to accept, or at the deepest."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens_ptr + request)
    root = request * num_nodes
    seed = tl.load(seed_ptr)
    request_id = tl.load(request_ids_ptr + request)
    if INDEPENDENT:
        drafts = _scheduled(seed, request_id, length, shares_ptr, num_steps)
    else:
        drafts = _spread(seed, request_id, tl.load(num_rounds_ptr + request), shares_ptr, num_steps)
    offs = tl.arange(0, NODES)  # [NODES]
    depth = tl.load(positions_ptr + root + offs, mask=offs < num_nodes, other=-1) - length
    limit = tl.where(length > 0, tl.maximum(tl.minimum(drafts, max_len - 1 - length), 0), 0)
    depth = tl.where((offs < num_nodes) & (depth <= limit), depth, -1)
    drafts = tl.where(length > 0, tl.max(depth, axis=0), 0).to(tl.int32)
    node = tl.min(tl.where(depth == drafts, offs, NODES), axis=0).to(tl.int64)
    store_path(path_ptrs, parents_ptr, request, root, length, node, drafts, num_steps)
    tl.store(rejected_ptr + request, -1)


def follow(
    batch: Batch,
    verify_input: VerifyInput,
    schedule: SyntheticSchedule,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> None:
    """Write the scheduled paths to accept_index and num_accepted_drafts, none for padded requests.

    rejected_B: i64 [B], becomes -1, as no child is rejected and the bonus is drawn from its node's whole distribution.
    """
    require_contiguous(positions=verify_input.positions, parents=verify_input.parents)
    _follow_kernel[(batch.size,)](
        positions_ptr=verify_input.positions,
        parents_ptr=verify_input.parents,
        request_ids_ptr=batch.request_ids,
        seq_lens_ptr=batch.seq_lens,
        num_rounds_ptr=batch.num_rounds,
        seed_ptr=schedule.seed,
        shares_ptr=schedule.shares,
        path_ptrs=PathTables.of(out),
        rejected_ptr=rejected_B,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        max_len=config.length_limit,
        INDEPENDENT=schedule.is_independent,
        NODES=next_power_of_2(config.num_draft_tokens),
    )
