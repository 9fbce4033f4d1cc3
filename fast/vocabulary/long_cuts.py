"""Filters of requests, and cuts of rows with too many tokens for a list, which are read several times."""

import math
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch, Sampling
from specsim.fast.runtime.launch import INTERPRETED, await_input, block_of, ceil_div, kernel, next_power_of_16
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.filters import Cut, Filters, Moments, Source, cut_rows
from specsim.fast.vocabulary.logit_rows import LogitRows
from specsim.fast.vocabulary.summaries import LOWEST_RANK

BLOCK = 4096  # tokens that are read at once
FAN = tl.constexpr(1 if INTERPRETED else 4)  # numbers between which a search tries at once
PROGRAMS = 264  # as many as a GPU runs at once
REGISTERS = 128  # of a thread, so that two programs fit into a multiprocessor
LEAST_P = tl.constexpr(1e-30)  # of top_p, so that the best token is always kept
# Last bits of an f32 that are equal in all numbers of a type.
SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class SamplingTables(NamedTuple):
    """Parameters of requests as kernel arguments, [B]."""

    temperature_ptr: torch.Tensor  # f64
    top_k_ptr: torch.Tensor  # i64
    top_p_ptr: torch.Tensor  # f64
    min_p_ptr: torch.Tensor  # f64

    @classmethod
    def of(cls, sampling: Sampling) -> Self:
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


@triton.jit
@no_type_check
def filters_of(sampling_ptrs, request, sampled, vocab_size):
    """Load the filters of rows, none where a row is not sampled."""
    top_k = tl.load(sampling_ptrs.top_k_ptr + request, mask=sampled, other=0)
    top_p = tl.maximum(tl.load(sampling_ptrs.top_p_ptr + request, mask=sampled, other=1.0).to(tl.float32), LEAST_P)
    min_p = tl.load(sampling_ptrs.min_p_ptr + request, mask=sampled, other=0.0).to(tl.float32)
    return Filters(tl.where(top_k < vocab_size, top_k, 0).to(tl.int32), tl.minimum(top_p, 1.0), min_p)


@kernel
@no_type_check
def _long_cuts_kernel(
    logits_ptr,
    adjusted_ptr,
    sampling_ptrs,
    moments_ptr,
    lasts_ptr,
    num_rows,
    rows_per_request,
    units,
    ALIGN: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut rows whose lists were too long, by reading all of a row several times.

    A program cuts ROWS at a time, in at most TURNS. Most often there is none, so all turns look for them at once.
    """
    vocab_size = units * ALIGN  # as a product, by which loads are known to be aligned
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    every = first + step * tl.arange(0, TURNS)[:, None] + tl.arange(0, ROWS)[None, :]  # [TURNS, ROWS]
    await_input(PDL)
    least = tl.min(tl.load(lasts_ptr + every * 3 + 1, mask=every < num_rows, other=0))
    end = tl.where(least < 0, num_rows, first)
    for start in range(first, end, step):
        offs = start + tl.arange(0, ROWS).to(tl.int64)  # [ROWS]
        last_token = tl.load(lasts_ptr + offs * 3 + 1, mask=offs < num_rows, other=0)
        long = last_token < 0
        if tl.max(long.to(tl.int32)) > 0:
            floor = tl.load(lasts_ptr + offs * 3, mask=long, other=LOWEST_RANK)
            is_adjusted = tl.load(lasts_ptr + offs * 3 + 2, mask=long, other=0)
            best = tl.load(moments_ptr + offs * 4, mask=long, other=0.0)
            scale = tl.load(moments_ptr + offs * 4 + 1, mask=long, other=1.0)
            total = tl.load(moments_ptr + offs * 4 + 3, mask=long, other=1.0)
            filters = filters_of(sampling_ptrs, offs // rows_per_request, long, vocab_size)
            rows = LogitRows(logits_ptr, adjusted_ptr, is_adjusted[:, None], offs[:, None] * vocab_size, vocab_size)
            source = Source(rows, None, tl.where(long, vocab_size, 0))
            shift = tl.where(is_adjusted > 0, 0, SHIFT)
            others = Cut(floor, last_token, total)
            cut = cut_rows(long, source, Moments(best, scale, total), filters, floor, shift, others, False, BLOCK, FAN)
            tl.store(moments_ptr + offs * 4 + 3, cut.mass, mask=long)
            tl.store(lasts_ptr + offs * 3, cut.last_rank, mask=long)
            tl.store(lasts_ptr + offs * 3 + 1, cut.last_token, mask=long)


def cut_long_rows(batch: Batch, made: Distributions) -> None:
    """Cut the rows of distributions whose last token is -1: they have the lowest rank that counts, and all mass."""
    logits = made.logits
    num_rows, vocab_size = logits.raw.shape
    rows = block_of(num_rows, 1, 8 * BLOCK)
    align = math.gcd(vocab_size, 16)
    programs = min(PROGRAMS, ceil_div(num_rows, rows))
    _long_cuts_kernel[(programs,)](
        logits_ptr=logits.raw,
        adjusted_ptr=logits.adjusted,
        sampling_ptrs=SamplingTables.of(batch.sampling),
        moments_ptr=made.moments,
        lasts_ptr=made.lasts,
        num_rows=num_rows,
        rows_per_request=max(1, logits.rows_per_request),
        units=vocab_size // align,
        ALIGN=align,
        SHIFT=SPARE_BITS[logits.raw.dtype],
        ROWS=rows,
        TURNS=next_power_of_16(ceil_div(num_rows, max(1, programs * rows))),
        BLOCK=BLOCK,
        num_warps=8,
        maxnreg=REGISTERS,
    )
