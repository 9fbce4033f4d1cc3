"""Distribution of every row without a sort and without writing probabilities, ties to the lower id.

Tokens have weights 2^((x - max) · log2(e) / T). A prefix of the ranking (by logit, then by id) is kept, with
probability = weight / kept mass. Temperature 0 keeps only the best token.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    kernel,
    next_power_of_2,
    require_contiguous,
)
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.filters import (
    MOST_GROUPS,
    MOST_LISTED,
    Cut,
    Filters,
    LogitRows,
    Moments,
    Source,
    cut_rows,
    floor_of,
    list_tokens,
    logits_at,
)
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import GROUP, LOWEST_RANK, num_groups, rank, scale_of, summarise, weights_of

LEAST_P = tl.constexpr(1e-30)  # of top_p, so that the best token is always kept
# Last bits of an f32 that are equal in all numbers of a type.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class SamplingTables(NamedTuple):
    """Parameters of requests as kernel arguments, [B]."""

    temperature_ptr: torch.Tensor  # f64
    top_k_ptr: torch.Tensor  # i64
    top_p_ptr: torch.Tensor  # f64
    min_p_ptr: torch.Tensor  # f64


@triton.jit
@no_type_check
def _argmax(rows, maxima, best, GROUP: tl.constexpr):
    """Find the lowest of the best tokens of rows [ROWS], in the first group with one."""
    vocab_size = rows.vocab_size
    groups = tl.arange(0, maxima.shape[1])[None, :]  # [1, GROUPS]
    group = tl.min(tl.where(maxima == best[:, None], groups, tl.cdiv(vocab_size, GROUP) - 1), axis=1)
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [ROWS, GROUP]
    found = logits_at(rows, tokens, (tokens >= 0) & (rows.is_adjusted >= 0)) == best[:, None]
    return tl.min(tl.where(found, tokens, vocab_size - 1), axis=1)


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
    FAN: tl.constexpr,
):
    """Cut the filtered rows, on lists of tokens where these are short, and keep the other rows' cut."""
    vocab_size = rows.vocab_size
    floor = floor_of(maxima, masses, moments, filters, shift, vocab_size, GROUP, FAN)
    wanted = mask & filtered[:, None] & (rank(maxima) >= floor[:, None])  # [ROWS, GROUPS]
    few = tl.sum(wanted.to(tl.int32), axis=1) <= MOST_GROUPS
    listed_ptr = list_ptr + MOST_GROUPS
    found = list_tokens(rows, wanted & few[:, None], floor, list_ptr, listed_ptr, GROUP, PER)
    listed = filtered & few & (found <= MOST_LISTED)
    rest = filtered & ~listed
    of_list = Source(rows, listed_ptr, tl.where(listed, found, 0))
    from_list = cut_rows(listed, of_list, moments, filters, floor, shift, cut, True, LISTED, FAN)
    of_rows = Source(rows, listed_ptr, tl.where(rest, vocab_size, 0))
    return cut_rows(rest, of_rows, moments, filters, floor, shift, from_list, False, PER * GROUP, FAN // 4)


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
    vocab_size,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    LISTED: tl.constexpr,
    FAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the moments and last kept tokens of some rows."""
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    groups = tl.arange(0, GROUPS)[None, :]  # [1, GROUPS]
    written = offs < num_rows
    request = offs // rows_per_request
    num_groups = tl.cdiv(vocab_size, GROUP)
    await_input(PDL)
    changed = tl.load(changed_ptr + request, mask=written, other=-1)
    real = changed >= 0
    temperature = tl.load(sampling_ptrs.temperature_ptr + request, mask=real, other=0.0)
    top_k = tl.load(sampling_ptrs.top_k_ptr + request, mask=real, other=0).to(tl.int32)
    top_p = tl.maximum(tl.load(sampling_ptrs.top_p_ptr + request, mask=real, other=1.0).to(tl.float32), LEAST_P)
    min_p = tl.load(sampling_ptrs.min_p_ptr + request, mask=real, other=0.0).to(tl.float32)
    mask = real[:, None] & (groups < num_groups)  # [ROWS, GROUPS]
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

    top_k = tl.where(sampled & (top_k < vocab_size), top_k, 0)
    top_p = tl.where(sampled, tl.minimum(top_p, 1.0), 1.0)
    min_p = tl.where(sampled, min_p, 0.0)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    moments = Moments(best, scale, total)
    if tl.max(filtered.to(tl.int32)) > 0:
        filters = Filters(top_k, top_p, min_p)
        cut = Cut(last_rank, last_token, mass)
        shift = tl.where(changed > 0, 0, SHIFT)
        list_ptr = lists_ptr + offs * (MOST_GROUPS + 2 * MOST_LISTED)
        last_rank, last_token, mass = _cut(
            rows, list_ptr, mask, maxima, masses, moments, filters, filtered, cut, shift, GROUP, PER, LISTED, FAN
        )
    tl.store(moments_ptr + offs * 4, best, mask=written)
    tl.store(moments_ptr + offs * 4 + 1, scale, mask=written)
    tl.store(moments_ptr + offs * 4 + 2, tl.log2(total), mask=written)
    tl.store(moments_ptr + offs * 4 + 3, mass, mask=written)
    tl.store(lasts_ptr + offs * 3, last_rank, mask=written)
    tl.store(lasts_ptr + offs * 3 + 1, last_token, mask=written)
    tl.store(lasts_ptr + offs * 3 + 2, tl.maximum(changed, 0), mask=written)


def distributions(batch: Batch, logits: Logits) -> Distributions:
    """Compute every row's distribution: one pass over the logits, then one launch for temperature and filters."""
    require_contiguous(logits=logits.raw, adjusted=logits.adjusted)
    summaries = summarise(logits.raw, batch.sampling.temperature, logits.changed, logits.adjusted)
    return summarised_distributions(batch, logits, summaries)


def summarised_distributions(
    batch: Batch, logits: Logits, summaries: tuple[torch.Tensor, torch.Tensor]
) -> Distributions:
    """Compute every row's distribution from the summaries of its logits."""
    num_rows, vocab_size = logits.raw.shape
    sampling = batch.sampling
    device = logits.raw.device
    maxima, sums = summaries
    moments = torch.empty(num_rows, 4, dtype=torch.float32, device=device)
    lasts = torch.empty(num_rows, 3, dtype=torch.int32, device=device)
    lists = torch.empty(num_rows, MOST_GROUPS.value + 2 * MOST_LISTED.value, dtype=torch.int32, device=device)
    groups = next_power_of_2(num_groups(vocab_size))
    rows = block_of(num_rows, 1, 16 * max(groups, 8 * GROUP))
    _distributions_kernel[(ceil_div(num_rows, rows),)](
        logits_ptr=logits.raw,
        adjusted_ptr=logits.adjusted,
        changed_ptr=logits.changed,
        maxima_ptr=maxima,
        sums_ptr=sums,
        sampling_ptrs=SamplingTables(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
        moments_ptr=moments,
        lasts_ptr=lasts,
        lists_ptr=lists,
        num_rows=num_rows,
        rows_per_request=max(1, logits.rows_per_request),
        vocab_size=vocab_size,
        SHIFT=_SPARE_BITS[logits.raw.dtype],
        ROWS=rows,
        GROUPS=groups,
        GROUP=GROUP,
        PER=min(8, groups),
        LISTED=512 if INTERPRETED else 256,
        FAN=4 if INTERPRETED else 16,
    )
    return Distributions(logits, maxima, sums, moments, lasts)
