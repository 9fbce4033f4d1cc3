"""The law of every row without sorting its vocabulary and without writing it down: ties go to the lower id.

A row's law is told by weights 2^((x - max) · log2(e) / T), of which a prefix of the ranking (by logit, then by id) is
kept: probability = weight / mass of the kept. Temperature 0 keeps the best token alone.
"""

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch
from specsim.fast.runtime.launch import INTERPRETED, await_input, block_of, kernel, require_contiguous
from specsim.fast.vocabulary.distribution import Law
from specsim.fast.vocabulary.filters import MOST_GROUPS, MOST_LISTED, cut_rows, floor_of, list_tokens, logits_at
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import GROUP, LOWEST_RANK, num_groups, rank, scale_of, summarise, weights_of

LEAST_P = tl.constexpr(1e-30)  # of top_p, so that the best token is always kept
# Bits at the end of an f32 that are alike in all numbers of a type.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _argmax(rows, maxima, best, GROUP: tl.constexpr):
    """The lowest of the best tokens of rows, by the first group that has one."""
    groups, count = tl.arange(0, maxima.shape[1])[None, :], tl.cdiv(rows[4], GROUP)
    group = tl.min(tl.where(maxima == best[:, None], groups, count - 1), axis=1)
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    found = logits_at(rows, tokens, (tokens >= 0) & (rows[2] >= 0)) == best[:, None]
    return tl.min(tl.where(found, tokens, rows[4] - 1), axis=1)


@kernel
def _laws(
    logits_ptr,
    adjusted_ptr,
    changed_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
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
    offs, groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, GROUPS)[None, :]
    mask, request, count = offs < num_rows, offs // rows_per_request, tl.cdiv(vocab_size, GROUP)
    await_input(PDL)
    changed = tl.load(changed_ptr + request, mask=mask, other=-1)
    real, written = changed >= 0, mask
    temperature = tl.load(temperature_ptr + request, mask=real, other=0.0)
    top_k = tl.load(top_k_ptr + request, mask=real, other=0).to(tl.int32)
    top_p = tl.maximum(tl.load(top_p_ptr + request, mask=real, other=1.0).to(tl.float32), LEAST_P)
    min_p = tl.load(min_p_ptr + request, mask=real, other=0.0).to(tl.float32)
    mask = real[:, None] & (groups < count)
    maxima = tl.load(maxima_ptr + offs[:, None] * count + groups, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + offs[:, None] * count + groups, mask=mask, other=0.0)
    best, scale, sampled = tl.where(real, tl.max(maxima, axis=1), 0.0), scale_of(temperature), temperature > 0
    masses = sums * weights_of(maxima, best[:, None], scale[:, None])
    total = tl.where(real, tl.sum(masses, axis=1), 1.0)
    rows = (logits_ptr, adjusted_ptr, changed[:, None], offs[:, None] * vocab_size, vocab_size)
    argmax = tl.where(real, 0, 0)
    if tl.max((real & (temperature == 0)).to(tl.int32)) > 0:
        argmax = _argmax(rows, tl.where(mask, maxima, float("-inf")), best, GROUP)
    last_rank, last_token = tl.where(sampled, LOWEST_RANK, rank(best)), tl.where(sampled, vocab_size, argmax)
    mass = tl.where(sampled, total, 1.0)

    top_k = tl.where(sampled & (top_k < vocab_size), top_k, 0)
    top_p, min_p = tl.where(sampled, tl.minimum(top_p, 1.0), 1.0), tl.where(sampled, min_p, 0.0)
    filtered, moments = (top_k > 0) | (top_p < 1) | (min_p > 0), (best, scale, total)
    if tl.max(filtered.to(tl.int32)) > 0:
        shift = tl.where(changed > 0, 0, SHIFT)
        floor = floor_of(maxima, masses, moments, (top_k, top_p, min_p), shift, vocab_size, GROUP, FAN)
        wanted = mask & filtered[:, None] & (rank(maxima) >= floor[:, None])
        few = tl.sum(wanted.to(tl.int32), axis=1) <= MOST_GROUPS
        list_ptr = lists_ptr + offs * (MOST_GROUPS + 2 * MOST_LISTED)
        found = list_tokens(rows, wanted & few[:, None], floor, list_ptr, list_ptr + MOST_GROUPS, GROUP, PER)
        listed = filtered & few & (found <= MOST_LISTED)
        rest, filters, cut = filtered & ~listed, (top_k, top_p, min_p), (last_rank, last_token, mass)
        source = (rows, list_ptr + MOST_GROUPS, tl.where(listed, found, 0))
        cut = cut_rows(listed, source, moments, filters, floor, shift, cut, True, LISTED, FAN)
        source = (rows, list_ptr + MOST_GROUPS, tl.where(rest, vocab_size, 0))
        last_rank, last_token, mass = cut_rows(
            rest, source, moments, filters, floor, shift, cut, False, PER * GROUP, FAN // 4
        )
    tl.store(moments_ptr + offs * 4, best, mask=written)
    tl.store(moments_ptr + offs * 4 + 1, scale, mask=written)
    tl.store(moments_ptr + offs * 4 + 2, tl.log2(total), mask=written)
    tl.store(moments_ptr + offs * 4 + 3, mass, mask=written)
    tl.store(lasts_ptr + offs * 3, last_rank, mask=written)
    tl.store(lasts_ptr + offs * 3 + 1, last_token, mask=written)
    tl.store(lasts_ptr + offs * 3 + 2, tl.maximum(changed, 0), mask=written)


def laws(batch: Batch, logits: Logits) -> Law:
    """The law of every row: one reading of all logits, then temperature, top-k, top-p and min-p in one launch."""
    (num_rows, vocab_size), sampling, device = logits.raw.shape, batch.sampling, logits.raw.device
    require_contiguous(logits=logits.raw, adjusted=logits.adjusted)
    maxima, sums = summarise(logits.raw, sampling.temperature, logits.changed, logits.adjusted)
    moments = torch.empty(num_rows, 4, dtype=torch.float32, device=device)
    lasts = torch.empty(num_rows, 3, dtype=torch.int32, device=device)
    lists = torch.empty(num_rows, MOST_GROUPS.value + 2 * MOST_LISTED.value, dtype=torch.int32, device=device)
    groups = triton.next_power_of_2(num_groups(vocab_size))
    rows = block_of(num_rows, 1, 16 * max(groups, 8 * GROUP))
    _laws[(triton.cdiv(num_rows, rows),)](
        logits.raw,
        logits.adjusted,
        logits.changed,
        maxima,
        sums,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        moments,
        lasts,
        lists,
        num_rows,
        max(1, logits.rows_per_request),
        vocab_size,
        SHIFT=_SPARE_BITS[logits.raw.dtype],
        ROWS=rows,
        GROUPS=groups,
        GROUP=GROUP,
        PER=min(8, groups),
        LISTED=512 if INTERPRETED else 256,
        FAN=4 if INTERPRETED else 16,
    )
    return Law(logits, maxima, sums, moments, lasts)
