"""Blocks of a grouped product: pairs of a row and one of its experts, gathered by expert."""

from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.fast.runtime.launch import await_input, ceil_div, kernel, next_power_of_2, require_contiguous

_CHUNK = 256  # pairs that are read at a time


class ExpertBlocks(NamedTuple):
    """Blocks of pairs with the same expert, each with room for `size` pairs.

    Pair p is row p // k of the rows and choice p % k of its k experts. Experts are in order, and the pairs of one.
    """

    experts: torch.Tensor  # i32 [blocks], -1 for an empty block; those come last
    pairs: torch.Tensor  # i32 [blocks, size], -1 beyond a block's last pair
    size: int


@kernel
@no_type_check
def _blocks_kernel(
    experts_ptr,
    pairs_ptr,
    chosen_ptr,
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the blocks of one expert; a program more than there are experts writes the empty ones."""
    await_input(PDL)
    own = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    offs_c = tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        mask = start + offs_c < num_pairs
        chosen = tl.load(chosen_ptr + start + offs_c, mask=mask, other=BLOCK_E - 1).to(tl.int32)
        counts += tl.histogram(chosen, BLOCK_E)
    # Entries of a last chunk that is not full were counted at an expert that does not exist.
    blocks = tl.where(offs_e < E, (counts + SIZE - 1) // SIZE, 0)
    first = tl.sum(tl.where(offs_e < own, blocks, 0), axis=0)
    count = tl.sum(tl.where(offs_e == own, blocks, 0), axis=0)
    if own == E:
        count = num_blocks - first
    offs_s = tl.arange(0, SIZE)
    expert = tl.where(own < E, own, -1)
    for block in range(first, first + count):
        tl.store(experts_ptr + block, expert)
    if own < E:
        held = 0
        for start in range(0, num_pairs, CHUNK):
            mask = start + offs_c < num_pairs
            chosen = tl.load(chosen_ptr + start + offs_c, mask=mask, other=-1).to(tl.int32)
            mine = (chosen == own).to(tl.int32)
            place = first * SIZE + held + tl.cumsum(mine, axis=0) - 1
            tl.store(pairs_ptr + place, start + offs_c, mask=mine > 0)
            held += tl.sum(mine, axis=0)
        if count > 0:
            last = (first + count - 1) * SIZE + offs_s
            tl.store(pairs_ptr + last, -1, mask=last >= first * SIZE + held)


def expert_blocks(experts_Rk: torch.Tensor, num_experts: int, size: int) -> ExpertBlocks:
    """Gather pairs of rows and experts, i16 [R, k], into blocks of `size`, as many as any choice may need."""
    require_contiguous(experts_Rk=experts_Rk)
    num_pairs = experts_Rk.numel()
    num_blocks = min(num_pairs, num_experts) + num_pairs // size
    experts = experts_Rk.new_empty(num_blocks, dtype=torch.int32)
    pairs = experts_Rk.new_empty(num_blocks, size, dtype=torch.int32)
    _blocks_kernel[(num_experts + 1,)](
        experts_ptr=experts,
        pairs_ptr=pairs,
        chosen_ptr=experts_Rk,
        num_pairs=num_pairs,
        num_blocks=num_blocks,
        E=num_experts,
        SIZE=size,
        BLOCK_E=max(16, next_power_of_2(num_experts + 1)),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return ExpertBlocks(experts, pairs, size)


def block_size(num_pairs: int, num_experts: int) -> int:
    """Choose the pairs of a block: twice an expert's average, from 16 to 128."""
    return max(16, min(128, next_power_of_2(ceil_div(2 * num_pairs, num_experts))))
