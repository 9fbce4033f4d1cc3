"""Selection of the candidates that form the verify tree, in one pass and without a sort.

Scores are ranked by the keys of specsim.fast.vocabulary.topk: of equal scores, the lower index is better.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.vocabulary.topk import ordered


@triton.jit
@no_type_check
def selected(scores, mask, count):
    """Select each row's `count` best of scores [ROWS, BLOCK]: (mask, number of selected ones before each).

    A bound is raised, two bits at a time, until exactly `count` scores reach it or it is the count-th best. Scores
    above it are selected, and the first of those equal to it. Three counts share a 64-bit word, so that one sum gives
    them all.
    """
    rank = tl.where(mask, ordered(scores), -0x80000000)  # no number's rank is that low
    bound = tl.full([scores.shape[0], 1], -0x80000000, tl.int64)
    reached = tl.full([scores.shape[0], 1], -1, tl.int64)
    shift = 30
    while (shift >= 0) & (tl.max(tl.max((reached != count).to(tl.int32), axis=1), axis=0) > 0):
        unit = tl.full((), 1, tl.int64) << shift
        counts = tl.zeros(rank.shape, tl.int64)
        for part in tl.static_range(1, 4):
            raised = (bound + part * unit).to(tl.int32)
            counts += (rank >= raised).to(tl.int64) << (20 * part - 20)
        sums = tl.sum(counts, axis=1, keep_dims=True)
        lower = bound
        for part in tl.static_range(1, 4):
            reaching = (sums >> (20 * part - 20)) & 0xFFFFF
            bound = tl.where(reaching >= count, lower + part * unit, bound)
            reached = tl.where(reaching >= count, reaching, reached)
        shift -= 2
    above = rank > bound.to(tl.int32)
    equal = (rank == bound.to(tl.int32)) & mask
    counted = tl.cumsum((above.to(tl.int64) << 32) | equal.to(tl.int64), axis=1)  # of both at once
    missing = count - tl.sum(above.to(tl.int32), axis=1, keep_dims=True)
    equals = (counted & 0xFFFFFFFF).to(tl.int32)
    is_selected = above | (equal & (equals <= missing))
    return is_selected, (counted >> 32).to(tl.int32) + tl.minimum(equals, missing) - is_selected.to(tl.int32)


@kernel
@no_type_check
def _select_kernel(
    scores_ptr,
    num_alive_ptr,
    out_ptr,
    num_rows,
    num_candidates,
    count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    index = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (index < num_candidates)
    scores = tl.load(scores_ptr + rows * num_candidates + index, mask=mask, other=0.0)
    if num_alive_ptr is not None:
        scores = tl.where(index < tl.load(num_alive_ptr + rows, mask=rows < num_rows, other=0), scores, -float("inf"))
    is_selected, order = selected(scores, mask, count)
    tl.store(out_ptr + rows * count + order, index, mask=is_selected)


def select(
    scores: torch.Tensor, count: int, num_alive: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Select the `count` best candidates, as ascending flat indices i64 [B, count].

    num_alive: i32 [B], the first num_alive candidates of a request go before all others; None: there are no others.
    Fused: selection and ordering, without a sort.
    """
    num_rows, num_candidates = scores.shape
    if count > num_candidates:
        raise ValueError(f"{count} candidates to select, there are {num_candidates}")
    require_contiguous(scores=scores)
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device) if out is None else out
    block = next_power_of_2(max(num_candidates, 1))
    rows = block_of(num_rows, 1, block)
    _select_kernel[(ceil_div(num_rows, rows),)](
        scores_ptr=scores,
        num_alive_ptr=num_alive,
        out_ptr=out,
        num_rows=num_rows,
        num_candidates=num_candidates,
        count=count,
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )
    return out
