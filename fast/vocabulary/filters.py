"""Cuts of a row's ranking (by logit, then by id) by top-k, top-p and min-p, without a sort.

The search is a bisection. Device functions work on ROWS rows at once. A cut is the rank and the id of the last token
that is kept. The bisection reads a list of the tokens on which a cut depends (specsim.fast.vocabulary.candidates) or,
where these are too many, the row. Rows are independent: work on one changes no other.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from specsim.fast.vocabulary.logit_rows import LogitRows, logits_at
from specsim.fast.vocabulary.summaries import LOWEST_RANK, rank, unrank

LOWEST_ENTRY = tl.constexpr(-0x8000000000000000)  # of a list, with LOWEST_RANK


class Source(NamedTuple):
    """Tokens of ROWS rows among which a cut is searched: a list of them, or the first of the vocabulary."""

    rows: LogitRows
    listed_ptr: tl.tensor | None  # [ROWS], i64, rank and id of each token of a row's list; read where LISTED
    size: tl.tensor  # i32 [ROWS], entries of the list, or tokens from 0 on


class Moments(NamedTuple):
    """Largest logit, log2(e) / T and sum of all weights of ROWS rows, f32 [ROWS]."""

    best: tl.tensor
    scale: tl.tensor
    total: tl.tensor


class Filters(NamedTuple):
    """Filters of ROWS rows, [ROWS]."""

    top_k: tl.tensor  # i32, 0 where it cuts nothing
    top_p: tl.tensor  # f32, 1 where it cuts nothing
    min_p: tl.tensor  # f32, 0 where it cuts nothing


class Cut(NamedTuple):
    """Last kept token of each of ROWS rows, and the sum of the kept weights."""

    last_rank: tl.tensor  # i32 [ROWS]
    last_token: tl.tensor  # i32 [ROWS]
    mass: tl.tensor  # f32 [ROWS]


@triton.jit
@no_type_check
def _tile(source, start, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Load (tokens, ranks) [ROWS, BLOCK] of a source from entry `start` on, LOWEST_RANK beyond its size."""
    entries = start + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = entries < source.size[:, None]  # [ROWS, BLOCK]
    if LISTED:
        listed = tl.load(source.listed_ptr[:, None] + entries, mask=mask, other=LOWEST_ENTRY)
        ranks = (listed >> 32).to(tl.int32)
        tokens = listed.to(tl.int32)
    else:
        tokens = entries + tl.full(mask.shape, 0, tl.int32)
        ranks = tl.where(mask, rank(logits_at(source.rows, tokens, mask)), LOWEST_RANK)
    return tokens, ranks


@triton.jit
@no_type_check
def _mass_of(ranks, best, scale, by_count):
    weights = tl.where(by_count, 1.0, tl.exp2((unrank(ranks) - best[:, None]) * scale[:, None]))
    return tl.where(ranks > LOWEST_RANK, weights, 0.0)


@triton.jit
@no_type_check
def _mass(source, best, scale, last_rank, last_token, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the weights that a cut keeps."""
    mass = tl.full(best.shape, 0, tl.float32)
    for start in range(0, tl.max(source.size), BLOCK):
        tokens, ranks = _tile(source, start, LISTED, BLOCK)
        bound = last_rank[:, None]
        kept = (ranks > bound) | ((ranks == bound) & (tokens <= last_token[:, None]))
        mass += tl.sum(tl.where(kept, _mass_of(ranks, best, scale, False), 0.0), axis=1)
    return mass


@triton.jit
@no_type_check
def _mass_above(source, best, scale, bounds, by_count, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the weights, or with by_count the number, of tokens ranked above each bound, [ROWS, FAN]."""
    mass = tl.full(bounds.shape, 0, tl.float32)
    for start in range(0, tl.max(source.size), BLOCK):
        _, ranks = _tile(source, start, LISTED, BLOCK)
        weights = _mass_of(ranks, best, scale, by_count)
        mass += tl.sum(tl.where(ranks[:, None, :] > bounds[:, :, None], weights[:, None, :], 0.0), axis=2)
    return mass


# A search keeps two numbers for each row, `low` for which a condition holds and `high` for which it does not, and tries
# FAN numbers between them at once. Numbers are ranks without the last `shift` bits, which are equal in all of a row.


@triton.jit
@no_type_check
def between(low, high, FAN: tl.constexpr):
    """Compute FAN equidistant numbers between low and high, [ROWS, FAN]."""
    parts = tl.arange(0, FAN)[None, :] + 1
    return low[:, None] + (high - low)[:, None] * parts // (FAN + 1)


@triton.jit
@no_type_check
def narrow(low, high, middles, is_high):
    """Narrow the range to the two neighbours between which the condition changes."""
    is_high &= middles > low[:, None]
    lower = tl.max(tl.where(is_high, low[:, None], middles), axis=1)
    return lower, tl.min(tl.where(is_high, middles, high[:, None]), axis=1)


@triton.jit
@no_type_check
def _keep_before(
    source,
    best,
    scale,
    cut,
    floor,
    shift,
    target,
    by_count,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    FAN: tl.constexpr,
):
    """Find (last rank, last token) of the tokens with less than `target` of mass before them, within `cut`.

    With by_count the mass is the number of tokens. floor: a lower bound on the cut's rank.
    """
    last_rank = cut.last_rank
    low = (tl.maximum(last_rank, floor).to(tl.int64) >> shift) - 1
    number = rank(best).to(tl.int64) >> shift
    while tl.max(number - low) > 1:  # above `number` there is less than target, above `low` there is not
        middles = between(low, number, FAN)
        bounds = (((middles + 1) << shift[:, None]) - 1).to(tl.int32)
        above = _mass_above(source, best, scale, bounds, by_count, LISTED, BLOCK)
        low, number = narrow(low, number, middles, above < target[:, None])
    bound = tl.where(number >= 0, number << shift, ((number + 1) << shift) - 1).to(tl.int32)
    above = _mass_above(source, best, scale, bound[:, None], by_count, LISTED, BLOCK)
    equals = tl.full(best.shape, 0, tl.float32)
    last = tl.full(best.shape, -1, tl.int32)
    for start in range(0, tl.max(source.size), BLOCK):
        tokens, ranks = _tile(source, start, LISTED, BLOCK)
        equal = ranks == bound[:, None]
        before = equals[:, None] + tl.cumsum(equal.to(tl.float32), axis=1) - 1
        kept = equal & (above + before * _mass_of(ranks, best, scale, by_count) < target[:, None])
        last = tl.maximum(last, tl.max(tl.where(kept, tokens, -1), axis=1))
        equals += tl.sum(equal.to(tl.float32), axis=1)
    return bound, tl.where(bound == last_rank, tl.minimum(last, cut.last_token), last)


@triton.jit
@no_type_check
def _least_rank(source, best, scale, least_weight, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Find the lowest rank among the tokens whose weight is at least `least_weight`."""
    least = rank(best)
    for start in range(0, tl.max(source.size), BLOCK):
        _, ranks = _tile(source, start, LISTED, BLOCK)
        heavy = (ranks > LOWEST_RANK) & (_mass_of(ranks, best, scale, False) >= least_weight[:, None])
        least = tl.minimum(least, tl.min(tl.where(heavy, ranks, 0x7FFFFFFF), axis=1))
    return least


@triton.jit
@no_type_check
def cut_source(source, moments, filters, floor, shift, LISTED: tl.constexpr, BLOCK: tl.constexpr, FAN: tl.constexpr):
    """Cut a source by top-k, then top-p, then min-p."""
    best, scale, total = moments
    top_k, top_p, min_p = filters
    last_rank = tl.full(best.shape, LOWEST_RANK, tl.int32)
    last_token = tl.full(best.shape, 0x7FFFFFFF, tl.int32)
    for step in range(2):
        by_count = step == 0
        applies = tl.where(by_count, top_k > 0, top_p < 1)
        if tl.max(applies.to(tl.int32)) > 0:
            cut = Cut(last_rank, last_token, total)
            target = tl.where(by_count, top_k.to(tl.float32), total * top_p)
            bound, token = _keep_before(source, best, scale, cut, floor, shift, target, by_count, LISTED, BLOCK, FAN)
            last_rank = tl.where(applies, bound, last_rank)
            last_token = tl.where(applies, token, last_token)
            left = _mass(source, best, scale, last_rank, last_token, LISTED, BLOCK)
            total = tl.where(applies, left, total)
    if tl.max(min_p) > 0:
        bound = _least_rank(source, best, scale, min_p, LISTED, BLOCK)
        raised = (min_p > 0) & (bound > last_rank)
        last_rank = tl.where(raised, bound, last_rank)
        last_token = tl.where(raised, 0x7FFFFFFF, last_token)
    return Cut(last_rank, last_token, _mass(source, best, scale, last_rank, last_token, LISTED, BLOCK))


@triton.jit
@no_type_check
def cut_rows(
    chosen, source, moments, filters, floor, shift, others, LISTED: tl.constexpr, BLOCK: tl.constexpr, FAN: tl.constexpr
):
    """Cut the chosen rows, and keep the cut of the other rows, whose source is empty."""
    last_rank, last_token, mass = others
    if tl.max(chosen.to(tl.int32)) > 0:
        top_k, top_p, min_p = filters
        own = Filters(tl.where(chosen, top_k, 0), tl.where(chosen, top_p, 1.0), tl.where(chosen, min_p, 0.0))
        own_floor = tl.where(chosen, floor, rank(moments.best))
        bound, token, kept = cut_source(source, moments, own, own_floor, shift, LISTED, BLOCK, FAN)
        last_rank = tl.where(chosen, bound, last_rank)
        last_token = tl.where(chosen, token, last_token)
        mass = tl.where(chosen, kept, mass)
    return Cut(last_rank, last_token, mass)
