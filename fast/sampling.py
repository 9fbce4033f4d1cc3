"""Distribution of every row without a sort and without writing probabilities, ties to the lower id.

Tokens have weights 2^((x - max) · log2(e) / T). A prefix of the ranking (by logit, then by id) is kept, with
probability = weight / kept mass. Temperature 0 keeps only the best token. Rows with too many tokens for a list are read
several times, in a kernel of their own.
"""

import math
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch, Sampling
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    kernel,
    next_power_of_2,
    next_power_of_16,
    require_contiguous,
)
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.filters import (
    ENTRIES,
    MOST_GROUPS,
    MOST_LISTED,
    Cut,
    Filters,
    Moments,
    TokenSource,
    cut_rows,
    floor_of,
    list_tokens,
)
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import (
    GROUP,
    LOWEST_RANK,
    LogitRows,
    logits_at,
    num_groups,
    rank,
    scale_of,
    summarise,
    weights_of,
)

BLOCK = 4096  # tokens that are read at once
LONG_FAN = tl.constexpr(1 if INTERPRETED else 4)  # FAN of a search in a long row
PROGRAMS = 264  # as many as a GPU runs at once
LEAST_P = tl.constexpr(1e-30)  # of top_p, so that the best token is always kept
# Last bits of an f32 that are equal in all numbers of a type.
SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
FAN = tl.constexpr(4)  # numbers between which a search tries at once
PART = tl.constexpr(8)  # tokens of a part of a group
PARTS = tl.constexpr(32)  # that are looked at at once
REGISTERS = 128  # of a thread: 16 rows of one warp each, or two programs of long rows, fit a multiprocessor


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
            source = TokenSource(rows, None, tl.where(long, vocab_size, 0))
            shift = tl.where(is_adjusted > 0, 0, SHIFT)
            others = Cut(floor, last_token, total)
            cut = cut_rows(
                long, source, Moments(best, scale, total), filters, floor, shift, others, False, BLOCK, LONG_FAN
            )
            tl.store(moments_ptr + offs * 4 + 3, cut.mass, mask=long)
            tl.store(lasts_ptr + offs * 3, cut.last_rank, mask=long)
            tl.store(lasts_ptr + offs * 3 + 1, cut.last_token, mask=long)


def cut_long_rows(batch: Batch, distributions: Distributions) -> None:
    """Cut the rows of distributions whose last token is -1: they have the lowest rank that counts, and all mass."""
    logits = distributions.logits
    num_rows, vocab_size = logits.raw.shape
    rows = block_of(num_rows, 1, 8 * BLOCK)
    align = math.gcd(vocab_size, 16)
    programs = min(PROGRAMS, ceil_div(num_rows, rows))
    _long_cuts_kernel[(programs,)](
        logits_ptr=logits.raw,
        adjusted_ptr=logits.adjusted,
        sampling_ptrs=SamplingTables.of(batch.sampling),
        moments_ptr=distributions.moments,
        lasts_ptr=distributions.lasts,
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


@triton.jit
@no_type_check
def _argmax(rows, maxima, best, GROUP: tl.constexpr):
    """Find the lowest of the best tokens of rows [ROWS], in the first group with one."""
    vocab_size = rows.vocab_size
    groups = tl.arange(0, maxima.shape[1])[None, :]  # [1, GROUPS]
    group = tl.min(tl.where(maxima == best[:, None], groups, tl.cdiv(vocab_size, GROUP) - 1), axis=1)
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [ROWS, GROUP]
    is_best = logits_at(rows, tokens, (tokens >= 0) & (rows.is_adjusted >= 0)) == best[:, None]
    return tl.min(tl.where(is_best, tokens, vocab_size - 1), axis=1)


@triton.jit
@no_type_check
def _cut(
    rows,
    list_ptr,
    mask,
    maxima,
    masses,
    moments,
    filters,
    filtered,
    cut,
    shift,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Cut the filtered rows on lists of tokens where these are short, and keep the other rows' cut.

    The cut of a row whose list is too long is (lower bound on the rank, -1, all mass), for cut_long_rows.
    """
    floor = floor_of(maxima, masses, moments, filters, shift, rows.vocab_size, GROUP, FAN)
    wanted = mask & filtered[:, None] & (rank(maxima) >= floor[:, None])  # [ROWS, GROUPS]
    few = tl.sum(wanted.to(tl.int32), axis=1) <= MOST_GROUPS
    num_listed = list_tokens(rows, wanted & few[:, None], floor, list_ptr, GROUP, min(PART, GROUP), PER, PARTS)
    listed = filtered & few & (num_listed <= MOST_LISTED)
    others = Cut(
        tl.where(filtered, floor, cut.last_rank),
        tl.where(filtered, -1, cut.last_token),
        tl.where(filtered, moments.total, cut.mass),
    )
    source = TokenSource(rows, list_ptr, tl.where(listed, num_listed, 0))
    return cut_rows(listed, source, moments, filters, floor, shift, others, True, LISTED, FAN)


@kernel
@no_type_check
def _distributions_kernel(
    logits_ptr,
    adjusted_ptr,
    changed_ptr,
    maxima_ptr,
    sums_ptr,
    sampling_ptrs,
    moments_ptr,
    lasts_ptr,
    lists_ptr,
    num_rows,
    rows_per_request,
    units,
    ALIGN: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the moments and last kept tokens of some rows."""
    vocab_size = units * ALIGN  # as a product, by which loads are known to be aligned
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    groups = tl.arange(0, GROUPS)[None, :]  # [1, GROUPS]
    written = offs < num_rows
    request = offs // rows_per_request
    num_groups = tl.cdiv(vocab_size, GROUP)
    await_input(PDL)
    changed = tl.load(changed_ptr + request, mask=written, other=-1)
    real = changed >= 0
    temperature = tl.load(sampling_ptrs.temperature_ptr + request, mask=written, other=0.0)
    temperature = tl.where(real, temperature, 0.0)
    mask = written[:, None] & (groups < num_groups)  # [ROWS, GROUPS]
    maxima = tl.load(maxima_ptr + offs[:, None] * num_groups + groups, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + offs[:, None] * num_groups + groups, mask=mask, other=0.0)
    best = tl.where(real, tl.max(maxima, axis=1), 0.0)
    scale = scale_of(temperature)
    sampled = temperature > 0
    masses = sums * weights_of(maxima, best[:, None], scale[:, None])
    total = tl.where(real, tl.sum(masses, axis=1), 1.0)
    rows = LogitRows(logits_ptr, adjusted_ptr, changed[:, None], offs[:, None] * vocab_size, vocab_size)
    argmax = tl.where(real, 0, 0)
    if tl.max((real & (temperature == 0)).to(tl.int32)) > 0:
        argmax = _argmax(rows, tl.where(mask, maxima, float("-inf")), best, GROUP)
    last_rank = tl.where(sampled, LOWEST_RANK, rank(best))
    last_token = tl.where(sampled, vocab_size, argmax)
    mass = tl.where(sampled, total, 1.0)

    filters = filters_of(sampling_ptrs, request, sampled, vocab_size)
    filtered = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    moments = Moments(best, scale, total)
    if tl.max(filtered.to(tl.int32)) > 0:
        cut = Cut(last_rank, last_token, mass)
        shift = tl.where(changed > 0, 0, SHIFT)
        list_ptr = lists_ptr + offs * ENTRIES
        last_rank, last_token, mass = _cut(
            rows, list_ptr, mask, maxima, masses, moments, filters, filtered, cut, shift, GROUP, PER, LISTED
        )
    tl.store(moments_ptr + offs * 4, best, mask=written)
    tl.store(moments_ptr + offs * 4 + 1, scale, mask=written)
    tl.store(moments_ptr + offs * 4 + 2, tl.log2(total), mask=written)
    tl.store(moments_ptr + offs * 4 + 3, mass, mask=written)
    tl.store(lasts_ptr + offs * 3, last_rank, mask=written)
    tl.store(lasts_ptr + offs * 3 + 1, last_token, mask=written)
    tl.store(lasts_ptr + offs * 3 + 2, tl.maximum(changed, 0), mask=written)


def distributions(batch: Batch, logits: Logits) -> Distributions:
    """Compute every row's distribution: one pass over the logits, then temperature and filters."""
    require_contiguous(logits=logits.raw, adjusted=logits.adjusted)
    summaries = summarise(logits.raw, batch.sampling.temperature, logits.changed, logits.adjusted)
    return summarised_distributions(batch, logits, summaries)


def summarised_distributions(
    batch: Batch, logits: Logits, summaries: tuple[torch.Tensor, torch.Tensor]
) -> Distributions:
    """Compute every row's distribution from the summaries of its logits."""
    num_rows, vocab_size = logits.raw.shape
    device = logits.raw.device
    maxima, sums = summaries
    moments = torch.empty(num_rows, 4, dtype=torch.float32, device=device)
    lasts = torch.empty(num_rows, 3, dtype=torch.int32, device=device)
    lists = torch.empty(num_rows, ENTRIES.value, dtype=torch.int64, device=device)
    groups = next_power_of_2(num_groups(vocab_size))
    rows = block_of(num_rows, 1, 16 * max(groups, 8 * GROUP))
    align = math.gcd(vocab_size, 16)
    results = Distributions(logits, maxima, sums, moments, lasts)
    _distributions_kernel[(ceil_div(num_rows, rows),)](
        logits_ptr=logits.raw,
        adjusted_ptr=logits.adjusted,
        changed_ptr=logits.changed,
        maxima_ptr=maxima,
        sums_ptr=sums,
        sampling_ptrs=SamplingTables.of(batch.sampling),
        moments_ptr=moments,
        lasts_ptr=lasts,
        lists_ptr=lists,
        num_rows=num_rows,
        rows_per_request=max(1, logits.rows_per_request),
        units=vocab_size // align,
        ALIGN=align,
        SHIFT=SPARE_BITS[logits.raw.dtype],
        ROWS=rows,
        GROUPS=groups,
        GROUP=GROUP,
        PER=min(8, groups),
        LISTED=512 if INTERPRETED else 128,
        num_warps=1,
        maxnreg=REGISTERS,
    )
    cut_long_rows(batch, results)
    return results
