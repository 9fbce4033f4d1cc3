"""Parts of pipelined attention, added up by the programs that have them, each for some of their request's pairs.

A program waits until the others of its request have stored their parts. That takes that a GPU starts programs in their
order and runs all of a request and a block at once: Plan.is_joined.
"""

import functools
from typing import no_type_check

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specsim.fast.runtime.gluon import await_count, barrier
from specsim.fast.runtime.launch import nearest

_PAIRS = gl.constexpr(128)  # of a program
_OWN = gl.constexpr(8)  # pairs that a program adds up at a time
_AT_A_TIME = gl.constexpr(8)  # parts


@functools.cache
def counters(device: torch.device, programs: int) -> torch.Tensor:
    """Allocate two counters for each program, 0 between launches, which follow each other."""
    return torch.zeros(2 * programs, dtype=torch.int64, device=device)


@gluon.jit
@no_type_check
def join_parts(out_ptr, parts_ptrs, counts_ptr, kept, split, num_splits, low_row, end, pairs,
               GROUP: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Add up all parts of every num_splits-th few of a block's pairs, always in order, and write their results.

    kept: the request's first part. low_row: its first row. end: of its pairs.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 128 // D, D // 4], [4, 1, 1], [2, 1, 0])
    BY_PART: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    BY_DIM: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BY_PAIR: gl.constexpr = gl.SliceLayout(1, BY_PART)
    OUT_PAIR: gl.constexpr = gl.SliceLayout(1, BY_DIM)
    head, block = gl.program_id(0), gl.program_id(2)
    heads = gl.num_programs(0)
    place = kept.to(gl.int64) * heads + head  # of the first part, counted over all parts and heads
    out_ptr += (low_row * heads + head) * GROUP * D
    # Programs that have stored their parts are counted first, and then those that have added theirs up.
    counts_ptr += 2 * (place * gl.num_programs(2) + block)
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, BY_DIM))[None, :]
    barrier()  # all lanes have stored their numbers
    gl.atomic_add(counts_ptr, 1, sem="release", scope="gpu")
    await_count(counts_ptr, num_splits)
    first = block * _PAIRS
    for low in range(first + split * _OWN, gl.minimum(first + _PAIRS, end), num_splits * _OWN):
        pair = low + gl.arange(0, _OWN, layout=BY_PAIR)
        top = gl.full([_OWN], float("-inf"), gl.float32, BY_PAIR)
        total = gl.zeros([_OWN], gl.float32, BY_PAIR)
        acc = gl.zeros([_OWN, D], gl.float32, BY_DIM)
        for part in range(0, num_splits, _AT_A_TIME):
            offs = part + gl.arange(0, _AT_A_TIME, layout=gl.SliceLayout(0, BY_PART))[None, :]
            mask = (pair < end)[:, None] & (offs < num_splits)
            offs = (place + offs * heads) * pairs + pair[:, None]
            part_top = gl.load(parts_ptrs.stats + 2 * offs, mask=mask, other=float("-inf"), cache_modifier=".cg")
            part_total = gl.load(parts_ptrs.stats + 2 * offs + 1, mask=mask, other=0.0, cache_modifier=".cg")
            place_d = offs[:, :, None] * D + dim[:, None, :]
            part_acc = gl.load(parts_ptrs.acc + place_d, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
            higher = gl.maximum(top, gl.max(part_top, axis=1))
            shift = gl.where(higher == float("-inf"), 0.0, higher)
            weight = gl.exp2(part_top - shift[:, None])
            before = gl.exp2(top - shift)
            added = gl.sum(part_acc * weight[:, :, None], axis=1)
            acc = acc * gl.convert_layout(before, OUT_PAIR)[:, None] + added
            total = total * before + gl.sum(part_total * weight, axis=1)
            top = higher
        divisor = gl.convert_layout(gl.where(total > 0, total, 1.0), OUT_PAIR)[:, None]
        pair = low + gl.arange(0, _OWN, layout=OUT_PAIR)[:, None]
        own_ptr = out_ptr + (pair // GROUP * heads * GROUP + pair % GROUP) * D + dim
        gl.store(own_ptr, nearest(acc / divisor, out_ptr.dtype.element_ty), mask=(pair < end) & (dim >= 0))
    barrier()  # all lanes have seen the count
    if gl.atomic_add(counts_ptr + 1, 1, sem="relaxed", scope="gpu") == num_splits - 1:
        gl.store(counts_ptr, 0)
        gl.store(counts_ptr + 1, 0)
