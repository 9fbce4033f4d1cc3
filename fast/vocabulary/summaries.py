"""The one full pass over the logits: each token group's largest logit and the sum of its weights.

Later kernels look at groups first and read only the groups that they need again. A weight is 2^((x - max) · scale),
here with the group's own max; scale = log2(e) / T.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous

GROUP = 256  # tokens
BLOCK = 4096  # tokens that a program reads at once on a GPU

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_T = tl.constexpr(1e-20)
MOST_T = tl.constexpr(1e30)  # beyond, (x - max) · scale may overflow or be 0 · inf
LOWEST_RANK = tl.constexpr(-(2**31))  # below the rank of every number


def num_groups(vocab_size: int) -> int:
    """Count the groups of a row, the last of them perhaps short."""
    return ceil_div(vocab_size, GROUP)


@triton.jit
@no_type_check
def rank(logits):
    """Map f32 to i32 in the same order, with -0 equal to 0."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(logits == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
@no_type_check
def unrank(ranks):
    """Map a rank to its f32."""
    return (ranks ^ ((ranks >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def scale_of(temperature):
    """Compute log2(e) / T, f32, with T = 1 where it is 0."""
    held = tl.minimum(tl.maximum(temperature, LEAST_T), MOST_T).to(tl.float32)
    return tl.where(temperature > 0, tl.div_rn(held * 0 + LOG2_E, held), LOG2_E)


@triton.jit
@no_type_check
def weights_of(logits, best, scale):
    """Compute 2^((x - best) · scale), 0 for -inf whatever best is."""
    return tl.exp2((logits - tl.where(best == float("-inf"), 0.0, best)) * scale)


@kernel
@no_type_check
def _summarise(
    logits_ptr,
    adjusted_ptr,
    marks_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    num_rows,
    rows_per_request,
    units,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    vocab_size = units * ALIGN  # told as a product, by which loads are known to be aligned
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    request = offs // rows_per_request
    mask = offs < num_rows
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_input(PDL)
    is_raw = mask
    scale = tl.full((ROWS,), LOG2_E, tl.float32)
    if marks_ptr is not None:
        marks = tl.load(marks_ptr + request, mask=mask, other=-1)
        is_raw = mask & ((marks == 0) if adjusted_ptr is not None else (marks >= 0))
    if temperature_ptr is not None:
        scale = scale_of(tl.load(temperature_ptr + request, mask=mask, other=0.0))
    places = offs[:, None] * vocab_size + tokens[None, :]
    inside = (tokens < vocab_size)[None, :]
    logits = tl.load(logits_ptr + places, mask=is_raw[:, None] & inside, other=float("-inf")).to(tl.float32)
    if adjusted_ptr is not None:
        is_adjusted = mask & (marks > 0)
        if tl.max(is_adjusted.to(tl.int32)) > 0:
            adjusted = is_adjusted[:, None] & inside
            logits = tl.where(adjusted, tl.load(adjusted_ptr + places, mask=adjusted, other=0.0), logits)
    logits = tl.reshape(logits, (ROWS, BLOCK // GROUP, GROUP))
    maxima = tl.max(logits, axis=2)
    sums = tl.sum(weights_of(logits, maxima[:, :, None], scale[:, None, None]), axis=2)
    groups = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    count = tl.cdiv(vocab_size, GROUP)
    out = offs[:, None] * count + groups[None, :]
    mask = mask[:, None] & (groups < count)[None, :]
    tl.store(maxima_ptr + out, maxima, mask=mask)
    tl.store(sums_ptr + out, sums, mask=mask)


def summarise(
    logits_RV: torch.Tensor,
    temperature_B: torch.Tensor | None = None,
    marks_B: torch.Tensor | None = None,
    adjusted_RV: torch.Tensor | None = None,
    group: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (the largest logit, Σ 2^((x - the largest) · log2(e) / T)) of every token group, f32 [R, G].

    temperature_B: f64; T = 1 where it is 0 or not given. marks_B: one for the same number of rows each; below 0 where
    rows are not read and, with adjusted_RV, above 0 where that has the rows' logits. group: tokens in a group, a power
    of two, default GROUP. A group without a possible token, and every group of a row not read, is (-inf, 0).
    """
    (num_rows, vocab_size) = logits_RV.shape
    device = logits_RV.device
    group = group or GROUP
    require_contiguous(logits=logits_RV, adjusted=adjusted_RV)
    maxima, sums = torch.empty(2, num_rows, ceil_div(vocab_size, group), dtype=torch.float32, device=device)
    block = max(group, min(next_power_of_2(vocab_size), block_of(2**16, BLOCK)))
    rows = block_of(num_rows, 1, 8 * block)
    align = math.gcd(vocab_size, 16)
    rows_per_request = 1 if marks_B is None else max(1, num_rows // max(1, len(marks_B)))
    _summarise[(ceil_div(num_rows, rows), ceil_div(vocab_size, block))](
        logits_ptr=logits_RV,
        adjusted_ptr=adjusted_RV,
        marks_ptr=marks_B,
        temperature_ptr=temperature_B,
        maxima_ptr=maxima,
        sums_ptr=sums,
        num_rows=num_rows,
        rows_per_request=rows_per_request,
        units=vocab_size // align,
        ALIGN=align,
        ROWS=rows,
        BLOCK=block,
        GROUP=group,
    )
    return maxima, sums
