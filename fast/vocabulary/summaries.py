"""The one full pass over the logits: each token group's largest logit and the sum of its weights.

Later kernels look at groups first and read only the groups that they need again. A weight is 2^((x - max) · scale),
here with the group's own max; scale = log2(e) / T.
"""

import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    kernel,
    next_power_of_2,
    require_contiguous,
)

GROUP = 256  # tokens
BLOCK = 4096  # tokens of a program on a GPU
# With many rows a program is one warp, which reads the next block while it summarises one.
WARP_BLOCK = 1024  # tokens
WARP_STEPS = 8  # blocks of a program
MANY_BLOCKS = 2**15  # of one warp in all rows, from which there are enough programs
WARP_REGISTERS = 64  # of a thread, so that 32 programs fit into a multiprocessor

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


class SummaryTables(NamedTuple):
    """Tables of summaries in device code."""

    maxima_ptr: tl.tensor
    sums_ptr: tl.tensor
    num_rows: tl.tensor
    num_groups: tl.tensor
    vocab_size: tl.tensor


@triton.jit
@no_type_check
def _with_adjusted(logits, adjusted_ptr, places, is_adjusted, inside):
    """Replace the logits of adjusted rows."""
    if tl.max(is_adjusted.to(tl.int32)) > 0:
        mask = is_adjusted[:, None] & inside
        logits = tl.where(mask, tl.load(adjusted_ptr + places, mask=mask, other=0.0), logits)
    return logits


@triton.jit
@no_type_check
def _store_summaries(logits, tables, offs, start, scale, GROUP: tl.constexpr):
    """Summarise the groups of one block of each row, [ROWS, BLOCK], from token `start` on."""
    maxima_ptr, sums_ptr, num_rows, count, _ = tables
    size: tl.constexpr = logits.shape[1] // GROUP
    logits = tl.reshape(logits, (logits.shape[0], size, GROUP))
    maxima = tl.max(logits, axis=2)
    sums = tl.sum(weights_of(logits, maxima[:, :, None], scale[:, None, None]), axis=2)
    groups = start // GROUP + tl.arange(0, size)
    out = offs[:, None] * count + groups[None, :]
    mask = (offs < num_rows)[:, None] & (groups < count)[None, :]
    tl.store(maxima_ptr + out, maxima, mask=mask)
    tl.store(sums_ptr + out, sums, mask=mask)


@triton.jit
@no_type_check
def _maximum_of_warp(values):
    """Find the maxima of f32 [SIZE, LANES] by i32 in the same order, for which a warp has an instruction."""
    bits = values.to(tl.int32, bitcast=True)
    largest = tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), axis=1)
    return (largest ^ ((largest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _store_block(block, maxima_ptr, sums_ptr, scale, GROUP: tl.constexpr):
    """Summarise the groups of a whole block of one row."""
    if block.dtype == tl.int32:
        low = (block << 16).to(tl.float32, bitcast=True)
        logits = tl.join(low, (block & -0x10000).to(tl.float32, bitcast=True))
    else:
        logits = block.to(tl.float32)
    size: tl.constexpr = logits.numel // GROUP
    logits = tl.reshape(logits, (size, GROUP // 8, 8))
    maxima = tl.max(logits, axis=2)
    maxima = _maximum_of_warp(maxima) if GROUP == 256 else tl.max(maxima, axis=1)
    sums = tl.sum(tl.sum(weights_of(logits, maxima[:, None, None], scale), axis=2), axis=1)
    groups = tl.arange(0, size)
    tl.store(maxima_ptr + groups, maxima)
    tl.store(sums_ptr + groups, sums)


@triton.jit
@no_type_check
def _summarise_blocks(logits_ptr, tables, row, first, count, scale, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Summarise `count` whole blocks of a row from token `first` on, each loaded while the one before is summarised."""
    maxima_ptr, sums_ptr, _, num_groups, vocab_size = tables
    first_group = row.to(tl.int64) * num_groups + first // GROUP
    maxima_ptr += first_group
    sums_ptr += first_group
    logits_ptr += row.to(tl.int64) * vocab_size + first
    pack: tl.constexpr = 2 if logits_ptr.dtype.element_ty == tl.bfloat16 else 1
    if pack == 2:
        logits_ptr = logits_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    offs = tl.arange(0, BLOCK // pack)
    block = tl.load(logits_ptr + offs)
    for _ in tl.range(1, count, loop_unroll_factor=2):
        logits_ptr += BLOCK // pack
        coming = tl.load(logits_ptr + offs)
        _store_block(block, maxima_ptr, sums_ptr, scale, GROUP)
        maxima_ptr += BLOCK // GROUP
        sums_ptr += BLOCK // GROUP
        block = coming
    _store_block(block, maxima_ptr, sums_ptr, scale, GROUP)


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
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Summarise the groups of STEPS blocks of some rows."""
    vocab_size = units * ALIGN  # told as a product, by which loads are known to be aligned
    parts = tl.cdiv(vocab_size, STEPS * BLOCK)  # programs next to each other read next to each other
    row_block = tl.program_id(0) // parts
    first = tl.program_id(0) % parts * (STEPS * BLOCK)
    offs = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    request = offs // rows_per_request
    mask = offs < num_rows
    await_input(PDL)
    is_raw = mask
    is_adjusted = mask & (offs < 0)  # none
    scale = tl.full((ROWS,), LOG2_E, tl.float32)
    if marks_ptr is not None:
        marks = tl.load(marks_ptr + request, mask=mask, other=-1)
        is_raw = mask & ((marks == 0) if adjusted_ptr is not None else (marks >= 0))
        is_adjusted = mask & (marks > 0)
    if temperature_ptr is not None:
        scale = scale_of(tl.load(temperature_ptr + request, mask=mask, other=0.0))
    tables = SummaryTables(maxima_ptr, sums_ptr, num_rows, tl.cdiv(vocab_size, GROUP), vocab_size)
    end = tl.minimum(first + STEPS * BLOCK, vocab_size)
    if STEPS > 1:
        num_blocks = tl.where(tl.max(is_raw.to(tl.int32)) > 0, (end - first) // BLOCK, 0)
        if num_blocks > 0:
            _summarise_blocks(logits_ptr, tables, row_block, first, num_blocks, tl.max(scale), BLOCK, GROUP)
            first += num_blocks * BLOCK
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)[None, :]
        inside = tokens < vocab_size
        places = offs[:, None] * vocab_size + tokens  # [ROWS, BLOCK]
        logits = tl.load(logits_ptr + places, mask=is_raw[:, None] & inside, other=float("-inf")).to(tl.float32)
        if adjusted_ptr is not None:
            logits = _with_adjusted(logits, adjusted_ptr, places, is_adjusted, inside)
        _store_summaries(logits, tables, offs, start, scale, GROUP)


def _is_many(logits_RV: torch.Tensor) -> bool:
    """Check whether programs are single warps.

    Numbers of two bytes in aligned rows are loaded eight at a time. Then a group is in one warp in all programs, and
    its sum has the same order of additions for any number of rows.
    """
    num_rows, vocab_size = logits_RV.shape
    one_warp = logits_RV.element_size() == 2 and vocab_size % 8 == 0
    blocks = num_rows * ceil_div(vocab_size, WARP_BLOCK)
    return not INTERPRETED and one_warp and vocab_size >= BLOCK and blocks >= MANY_BLOCKS


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
    is_many = _is_many(logits_RV)
    block = max(group, min(next_power_of_2(vocab_size), block_of(2**16, WARP_BLOCK if is_many else BLOCK)))
    steps = WARP_STEPS if is_many else 1
    rows = block_of(num_rows, 1, 8 * block)
    align = math.gcd(vocab_size, 16)
    rows_per_request = 1 if marks_B is None else max(1, num_rows // max(1, len(marks_B)))
    _summarise[(ceil_div(num_rows, rows) * ceil_div(vocab_size, steps * block),)](
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
        STEPS=steps,
        GROUP=group,
        num_warps=1 if is_many else 4,
        maxnreg=WARP_REGISTERS if is_many else None,
    )
    return maxima, sums


class LogitRows(NamedTuple):
    """Rows of logits on the device, raw or adjusted."""

    logits_ptr: tl.tensor
    adjusted_ptr: tl.tensor
    is_adjusted: tl.tensor  # whether the row is read from adjusted_ptr; broadcasts to the tokens' shape
    first: tl.tensor  # place of the row's first token; broadcasts to the tokens' shape
    vocab_size: tl.tensor


@triton.jit
@no_type_check
def logits_at(rows, tokens, mask):
    """Load logits of tokens of rows after penalties and bias, f32."""
    mask &= (tokens >= 0) & (tokens < rows.vocab_size)
    is_raw = rows.is_adjusted == 0
    is_adjusted = rows.is_adjusted != 0
    raw = tl.load(rows.logits_ptr + rows.first + tokens, mask=mask & is_raw, other=float("-inf")).to(tl.float32)
    adjusted = tl.load(rows.adjusted_ptr + rows.first + tokens, mask=mask & is_adjusted, other=float("-inf"))
    return tl.where(is_adjusted, adjusted, raw)
