"""Sums over ranks: every rank reads all parts and adds them in the order of the ranks.

So a result has the same bits on every rank, and whatever gathers the parts.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.rank_group import RankGroup
from specsim.fast.model.linear import Written
from specsim.fast.model.rows import Norm, Rows
from specsim.fast.runtime.gather import gather
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, nearest, next_power_of_2
from specsim.fast.runtime.peer_memory import PROGRAMS, LinkedRanks, PeerMemory, meet_others, next_exchange


@triton.jit
@no_type_check
def _write(
    out_ptrs,
    total,
    base_ptr,
    norm_ptr,
    row,
    num_rows,
    SIZE: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add the base to rows of sums, f32, write them, and prepare the next norm."""
    offs = tl.arange(0, total.shape[1])[None, :]
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs < SIZE)
    total = nearest(total, DTYPE).to(tl.float32)
    if base_ptr is not None:
        base = tl.load(base_ptr + row[:, None] * STRIDE_BASE + offs, mask=mask, other=0.0).to(tl.float32)
        total = nearest(base + total, DTYPE).to(tl.float32)
    tl.store(out_ptrs.rows + row[:, None] * STRIDE_OUT + offs, nearest(total, DTYPE), mask=mask)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
        tl.store(out_ptrs.weighted + row[:, None] * SIZE + offs, nearest(total * weight, DTYPE), mask=mask)
        tl.store(out_ptrs.squares + row, tl.sum(total * total, axis=1), mask=mask_r)


@kernel
@no_type_check
def _sum_kernel(
    out_ptrs,
    parts_ptr,
    base_ptr,
    norm_ptr,
    num_rows,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add gathered parts of some rows in the order of the ranks, then the base."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows)[:, None] & (offs < SIZE)
    total = tl.load(parts_ptr + row[:, None] * SIZE + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_H]
    for rank in tl.static_range(1, RANKS):
        part = (rank * num_rows + row[:, None]) * SIZE + offs
        total += tl.load(parts_ptr + part, mask=mask, other=0.0).to(tl.float32)
    _write(out_ptrs, total, base_ptr, norm_ptr, row, num_rows, SIZE, STRIDE_OUT, STRIDE_BASE, DTYPE)


@kernel
@no_type_check
def _exchanged_sum_kernel(
    out_ptrs,
    part_ptr,
    peers_ptrs,
    base_ptr,
    norm_ptr,
    num_rows,
    most_spins,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exchange parts of every PROGRAMS-th row, and add them as the kernel above does."""
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptrs.rows.dtype.element_ty
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK_H).to(tl.int64)[None, :]
    mask = offs < SIZE
    epoch, first = next_exchange(peers_ptrs, program)
    for index in range(program, num_rows, PROGRAMS):
        place = index * SIZE + offs
        tl.store(peers_ptrs.memory[RANK] + first + place, tl.load(part_ptr + place, mask=mask, other=0.0), mask=mask)
    if program < num_rows:
        meet_others(peers_ptrs, program, epoch, most_spins, RANK, RANKS)
    for index in range(program, num_rows, PROGRAMS):
        row = index + tl.arange(0, 1).to(tl.int64)
        place = first + row[:, None] * SIZE + offs
        total = tl.load(peers_ptrs.memory[0] + place, mask=mask, other=0.0).to(tl.float32)  # [1, BLOCK_H]
        for rank in tl.static_range(1, RANKS):
            total += tl.load(peers_ptrs.memory[rank] + place, mask=mask, other=0.0).to(tl.float32)
        _write(out_ptrs, total, base_ptr, norm_ptr, row, num_rows, SIZE, STRIDE_OUT, STRIDE_BASE, DTYPE)
    tl.store(peers_ptrs.epochs + program, epoch)


def sum_onto(
    ranks: RankGroup,
    base: torch.Tensor | None,
    part_RH: torch.Tensor,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> Rows:
    """Compute base + Σ parts over ranks, [R, H], and prepare the next norm.

    base and out may be slices of wider tensors.
    """
    part_RH = part_RH.contiguous()
    out = torch.empty_like(part_RH) if out is None else out
    onto = Rows.to_write(out, norm, 1)
    if isinstance(ranks, LinkedRanks) and ranks.links(part_RH):
        exchanged_sum(ranks.peers, base, part_RH, onto)
        return onto
    parts = gather(ranks, part_RH)
    num_rows, size = part_RH.shape
    block = block_of(num_rows, 1, size)
    _sum_kernel[(ceil_div(num_rows, block),)](
        out_ptrs=Written(out, onto.weighted, onto.squares),
        parts_ptr=parts,
        base_ptr=base,
        norm_ptr=onto.next_weight,
        num_rows=num_rows,
        RANKS=ranks.size,
        SIZE=size,
        STRIDE_OUT=out.stride(0),
        STRIDE_BASE=0 if base is None else base.stride(0),
        BLOCK_R=block,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return onto


def exchanged_sum(peers: PeerMemory, base: torch.Tensor | None, part_RH: torch.Tensor, onto: Rows) -> None:
    """Compute the same sum through the memory of the other ranks, in one kernel."""
    num_rows, size = part_RH.shape
    _exchanged_sum_kernel[(PROGRAMS,)](
        out_ptrs=Written(onto.values, onto.weighted, onto.squares),
        part_ptr=part_RH,
        peers_ptrs=peers.arguments(part_RH.dtype),
        base_ptr=base,
        norm_ptr=onto.next_weight,
        num_rows=num_rows,
        most_spins=peers.most_spins,
        RANK=peers.rank,
        RANKS=len(peers.memory),
        SIZE=size,
        STRIDE_OUT=onto.values.stride(0),
        STRIDE_BASE=0 if base is None else base.stride(0),
        PROGRAMS=PROGRAMS,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
