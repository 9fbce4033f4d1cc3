"""Synthetic acceptance in one program a request: what its schedule accepts this round, and the path that is taken."""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.uniforms import seed_bits
from specsim.fast.runtime.launch import await_input, kernel, require_contiguous
from specsim.fast.runtime.uniforms import SYNTHETIC, word


@dataclass(frozen=True, slots=True)
class Schedule:
    """A SyntheticAcceptance on a device: seed i64 [1], shares i64 [S] in units of 1/2²⁴."""

    seed: torch.Tensor
    shares: torch.Tensor
    is_independent: bool

    @classmethod
    def of(cls, acceptance: SyntheticAcceptance, device: torch.device | str) -> Self:
        seed, shares = ([seed_bits(acceptance.seed)], acceptance.shares)
        seed, shares = (torch.tensor(values, dtype=torch.int64, device=device) for values in (seed, shares))
        return cls(seed, shares, acceptance.schedule == "independent")


@triton.jit
def _scheduled(seed, request_id, length, shares_ptr, num_steps):
    """Accepted drafts of schedule `independent`."""
    uniform, drafts = word(seed, request_id, SYNTHETIC, length, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)), 0
    for position in range(num_steps):
        drafts += (uniform < tl.load(shares_ptr + position)).to(tl.int32)
    return drafts


@triton.jit
def _spread(seed, request_id, num_rounds, shares_ptr, num_steps):
    """Accepted drafts of schedule `minimum-variance` in the round after num_rounds."""
    zero, before, after = tl.full((), 0, tl.int32), num_rounds, num_rounds + 1
    drafts = zero.to(tl.int64)
    for position in range(num_steps):
        share = tl.load(shares_ptr + position)
        phase = word(seed, request_id, SYNTHETIC, zero, zero + position, zero).to(tl.int64)
        before, after = (before * share + phase) >> 24, (after * share + phase) >> 24
        drafts += after - before
    return drafts.to(tl.int32)


@kernel
def _follow(
    positions_ptr,
    parents_ptr,
    request_ids_ptr,
    seq_lens_ptr,
    num_rounds_ptr,
    seed_ptr,
    shares_ptr,
    accept_index_ptr,
    num_drafts_ptr,
    rejected_ptr,
    num_nodes,
    num_steps,
    max_len,
    INDEPENDENT: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of the nodes of the depth to accept, or of the deepest, the first is taken, and its ancestors."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    length, root = tl.load(seq_lens_ptr + request), request * num_nodes
    seed, request_id = tl.load(seed_ptr), tl.load(request_ids_ptr + request)
    if INDEPENDENT:
        drafts = _scheduled(seed, request_id, length, shares_ptr, num_steps)
    else:
        drafts = _spread(seed, request_id, tl.load(num_rounds_ptr + request), shares_ptr, num_steps)
    offs = tl.arange(0, NODES)
    depth = tl.load(positions_ptr + root + offs, mask=offs < num_nodes, other=-1) - length
    limit = tl.where(length > 0, tl.maximum(tl.minimum(drafts, max_len - 1 - length), 0), 0)
    depth = tl.where((offs < num_nodes) & (depth <= limit), depth, -1)
    drafts = tl.where(length > 0, tl.max(depth, axis=0), 0).to(tl.int32)
    node = tl.min(tl.where(depth == drafts, offs, NODES), axis=0).to(tl.int64)
    accept_index_ptr += request * (num_steps + 1)
    for step in range(drafts):
        tl.store(accept_index_ptr + drafts - step, (root + node).to(tl.int32))
        node = tl.load(parents_ptr + root + node)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(num_drafts_ptr + request, drafts)
    tl.store(rejected_ptr + request, -1)


def follow(
    batch: Batch,
    verify_input: VerifyInput,
    schedule: Schedule,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> None:
    """Write accept_index and num_accepted_drafts of the paths that the schedule takes; none for padded requests.

    rejected_B: i64 [B], becomes -1: no child is rejected, and the bonus is drawn from its node's whole law.
    """
    positions, parents, num_steps = verify_input.positions, verify_input.parents, config.num_steps
    require_contiguous(positions=positions, parents=parents)
    _follow[(batch.size,)](
        positions,
        parents,
        batch.request_ids,
        batch.seq_lens,
        batch.num_rounds,
        schedule.seed,
        schedule.shares,
        out.accept_index,
        out.num_accepted_drafts,
        rejected_B,
        config.num_draft_tokens,
        num_steps,
        config.max_len,
        INDEPENDENT=schedule.is_independent,
        NODES=triton.next_power_of_2(config.num_draft_tokens),
    )
