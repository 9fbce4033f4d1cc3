"""Cuts of a row's ranking (by logit, then by id) by top-k, top-p and min-p, without a sort.

The search is a bisection. Device functions work on ROWS rows at once. A cut is the rank and the id of the last token
that is kept. Summaries of groups find the tokens on which a cut depends. Where these are few they are listed once and
the bisection reads the list; otherwise it reads the row. Rows are independent: work on one changes no other.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from specsim.fast.vocabulary.summaries import LOWEST_RANK, rank, unrank, weights_of

MOST_GROUPS = tl.constexpr(256)  # that are read again to list their tokens
MOST_LISTED = tl.constexpr(4096)  # tokens that a list has room for
NEARLY_ALL = tl.constexpr(1 - 2.0**-16)  # of the mass that a floor may leave out: more than the sums' roundings


class LogitRows(NamedTuple):
    """Rows of logits on the device, raw or adjusted."""

    logits_ptr: tl.tensor
    adjusted_ptr: tl.tensor
    is_adjusted: tl.tensor  # whether the row is read from adjusted_ptr; broadcasts to the tokens' shape
    first: tl.tensor  # place of the row's first token; broadcasts to the tokens' shape
    vocab_size: tl.tensor


class Source(NamedTuple):
    """Tokens of ROWS rows among which a cut is searched: a list of them, or the first of the vocabulary."""

    rows: LogitRows
    listed_ptr: tl.tensor | None  # [ROWS], where a row's list of pairs (rank, id) begins; read where LISTED
    size: tl.tensor  # i32 [ROWS], pairs of the list, or tokens from 0 on


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
def logits_at(rows, tokens, mask):
    """Load logits of tokens of rows after penalties and bias, f32."""
    mask &= (tokens >= 0) & (tokens < rows.vocab_size)
    is_raw = rows.is_adjusted == 0
    is_adjusted = rows.is_adjusted != 0
    raw = tl.load(rows.logits_ptr + rows.first + tokens, mask=mask & is_raw, other=float("-inf")).to(tl.float32)
    adjusted = tl.load(rows.adjusted_ptr + rows.first + tokens, mask=mask & is_adjusted, other=float("-inf"))
    return tl.where(is_adjusted, adjusted, raw)


@triton.jit
@no_type_check
def _tile(source, start, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Load (tokens, ranks) [ROWS, BLOCK] of a source from entry `start` on, LOWEST_RANK beyond its size."""
    entries = start + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = entries < source.size[:, None]  # [ROWS, BLOCK]
    if LISTED:
        entry_ptr = source.listed_ptr[:, None] + 2 * entries
        ranks = tl.load(entry_ptr, mask=mask, other=LOWEST_RANK)
        tokens = tl.load(entry_ptr + 1, mask=mask, other=0)
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
def _between(low, high, FAN: tl.constexpr):
    """Compute FAN equidistant numbers between low and high, [ROWS, FAN]."""
    parts = tl.arange(0, FAN)[None, :] + 1
    return low[:, None] + (high - low)[:, None] * parts // (FAN + 1)


@triton.jit
@no_type_check
def _narrow(low, high, middles, is_high):
    is_high &= middles > low[:, None]
    lower = tl.max(tl.where(is_high, low[:, None], middles), axis=1)
    return lower, tl.min(tl.where(is_high, middles, high[:, None]), axis=1)


@triton.jit
@no_type_check
def _rank_from(number, shift):
    """Compute the lowest rank of a number."""
    return tl.maximum(number << shift, LOWEST_RANK).to(tl.int32)


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
        middles = _between(low, number, FAN)
        bounds = (((middles + 1) << shift[:, None]) - 1).to(tl.int32)
        above = _mass_above(source, best, scale, bounds, by_count, LISTED, BLOCK)
        low, number = _narrow(low, number, middles, above < target[:, None])
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


@triton.jit
@no_type_check
def _floor_by_count(ranks, highest, count, shift, FAN: tl.constexpr):
    """Find the count-th highest rank of the groups' maxima, or LOWEST_RANK if there are fewer.

    At least `count` tokens reach it.
    """
    low = tl.full(highest.shape, LOWEST_RANK, tl.int64) >> shift
    high = (highest.to(tl.int64) >> shift) + 1
    while tl.max(high - low) > 1:  # `low` is reached by as many, or lowest
        middles = _between(low, high, FAN)
        reached = ranks[:, None, :] >= _rank_from(middles, shift[:, None])[:, :, None]
        low, high = _narrow(low, high, middles, tl.sum(reached.to(tl.int32), axis=2) < count[:, None])
    return _rank_from(low, shift)


@triton.jit
@no_type_check
def _floor_by_mass(maxima, masses, moments, top_p, shift, vocab_size, GROUP: tl.constexpr, FAN: tl.constexpr):
    """Find a rank below which, by the groups' summaries, there is less than 1 - top_p of the mass.

    Mass below the rank is bounded by all mass of the groups that do not reach it. Of each group that does, it is at
    most everything but the largest token, and at most GROUP tokens just below the rank.
    """
    best, scale, total = moments
    ranks = rank(maxima)
    lighter = masses - weights_of(maxima, best[:, None], scale[:, None])
    spare = total * (NEARLY_ALL - top_p)
    tiny = tl.log2(tl.maximum(spare, 1e-30) / (2.0 * vocab_size))  # so little that all tokens together are spare
    low = rank(best + tiny / scale).to(tl.int64) >> shift
    low = tl.maximum(low, (tl.full(best.shape, LOWEST_RANK, tl.int64) >> shift) + 1)
    high = (rank(best).to(tl.int64) >> shift) + 1
    while tl.max(high - low) > 1:
        middles = _between(low, high, FAN)
        floors = _rank_from(middles, shift[:, None])
        most = GROUP * tl.exp2((unrank(floors) - best[:, None]) * scale[:, None])
        inside = tl.minimum(lighter[:, None, :], most[:, :, None])
        left_out = tl.sum(tl.where(ranks[:, None, :] >= floors[:, :, None], inside, masses[:, None, :]), axis=2)
        low, high = _narrow(low, high, middles, left_out > spare[:, None])
    return tl.where(spare > 0, _rank_from(low, shift), LOWEST_RANK)


@triton.jit
@no_type_check
def floor_of(maxima, masses, moments, filters, shift, vocab_size, GROUP: tl.constexpr, FAN: tl.constexpr):
    """Find a rank below which no token matters to the cuts, by the summaries of groups."""
    best, scale, _ = moments
    top_k, top_p, min_p = filters
    floor = tl.full(best.shape, LOWEST_RANK, tl.int32)
    if tl.min(top_p) < 1:
        by_mass = _floor_by_mass(maxima, masses, moments, top_p, shift, vocab_size, GROUP, FAN)
        floor = tl.where(top_p < 1, by_mass, floor)
    if tl.max(min_p) > 0:
        distance = tl.log2(tl.maximum(min_p, 1e-30)) / scale
        below = best + distance - 2.0**-18 * (tl.abs(best) + tl.abs(distance))
        floor = tl.where(min_p > 0, tl.maximum(floor, rank(below)), floor)
    if tl.max(top_k) > 0:  # top-p counts all that top-k leaves
        floor = tl.where(top_k > 0, _floor_by_count(rank(maxima), rank(best), top_k, shift, FAN), floor)
    return floor


@triton.jit
@no_type_check
def list_tokens(rows, wanted, floor, groups_ptr, listed_ptr, GROUP: tl.constexpr, PER: tl.constexpr):
    """List the tokens of the wanted groups [ROWS, GROUPS] that reach `floor`, ascending, and count them, [ROWS].

    groups_ptr, listed_ptr: [ROWS], the starts of a row's lists of groups and of tokens. The list ends at MOST_LISTED.
    """
    groups = tl.arange(0, wanted.shape[1])[None, :]
    tl.store(groups_ptr[:, None] + tl.cumsum(wanted.to(tl.int32), axis=1) - 1, groups, mask=wanted)
    tl.debug_barrier()
    count = tl.sum(wanted.to(tl.int32), axis=1)
    found = tl.full(floor.shape, 0, tl.int32)
    offs = tl.arange(0, PER * GROUP)[None, :]
    for start in range(0, tl.max(count), PER):
        entry = start + offs // GROUP
        mask = entry < count[:, None]
        tokens = tl.load(groups_ptr[:, None] + entry, mask=mask, other=0) * GROUP + offs % GROUP
        ranks = rank(logits_at(rows, tokens, mask))
        reach = mask & (tokens < rows.vocab_size) & (ranks >= floor[:, None])
        place = found[:, None] + tl.cumsum(reach.to(tl.int32), axis=1) - 1
        mask = reach & (place < MOST_LISTED)
        tl.store(listed_ptr[:, None] + 2 * place, ranks, mask=mask)
        tl.store(listed_ptr[:, None] + 2 * place + 1, tokens, mask=mask)
        found += tl.sum(reach.to(tl.int32), axis=1)
    tl.debug_barrier()
    return found
