"""Cuts of a row's ranking (by logit, then by id) by top-k, top-p and min-p, without a sort.

The search is a bisection. Device functions work on ROWS rows at once. A cut is the rank and the id of the last token
that is kept. The bisection reads a list of the tokens on which a cut depends, which begins at a lower bound on their
rank from the groups' summaries, or, where these are too many, the row. Rows are independent: work on one changes no
other.
"""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from specsim.fast.vocabulary.summaries import LOWEST_RANK, LogitRows, logits_at, rank, unrank, weights_of

LOWEST_ENTRY = tl.constexpr(-0x8000000000000000)  # of a list, with LOWEST_RANK
MOST_GROUPS = tl.constexpr(256)  # that are read again to list their tokens
MOST_LISTED = tl.constexpr(4096)  # tokens, and parts of groups, that a list has room for
ENTRIES = tl.constexpr(4096 + 256 + 4096)  # of a row's workspace: tokens, groups and parts
LOWEST_NUMBER = tl.constexpr(-0x7F800001)  # rank of -inf
NEARLY_ALL = tl.constexpr(1 - 2.0**-16)  # of the mass that a floor may leave out: more than the sums' roundings


class TokenSource(NamedTuple):
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
        in_cut = (ranks > bound) | ((ranks == bound) & (tokens <= last_token[:, None]))
        mass += tl.sum(tl.where(in_cut, _mass_of(ranks, best, scale, False), 0.0), axis=1)
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
        in_cut = equal & (above + before * _mass_of(ranks, best, scale, by_count) < target[:, None])
        last = tl.maximum(last, tl.max(tl.where(in_cut, tokens, -1), axis=1))
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
            cut_mass = _mass(source, best, scale, last_rank, last_token, LISTED, BLOCK)
            total = tl.where(applies, cut_mass, total)
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
        row_filters = Filters(tl.where(chosen, top_k, 0), tl.where(chosen, top_p, 1.0), tl.where(chosen, min_p, 0.0))
        row_floor = tl.where(chosen, floor, rank(moments.best))
        bound, token, cut_mass = cut_source(source, moments, row_filters, row_floor, shift, LISTED, BLOCK, FAN)
        last_rank = tl.where(chosen, bound, last_rank)
        last_token = tl.where(chosen, token, last_token)
        mass = tl.where(chosen, cut_mass, mass)
    return Cut(last_rank, last_token, mass)


@triton.jit
@no_type_check
def _rank_from(number, shift):
    """Compute the lowest rank of a number."""
    return tl.maximum(number << shift, LOWEST_RANK).to(tl.int32)


@triton.jit
@no_type_check
def _floor_by_count(ranks, highest, count, shift, FAN: tl.constexpr):
    """Find the count-th highest rank of the groups' maxima, or LOWEST_RANK if there are fewer.

    At least `count` tokens reach it.
    """
    is_group = ranks > LOWEST_RANK
    lowest = tl.min(tl.where(is_group, ranks, 0x7FFFFFFF), axis=1)
    lowest = tl.where(count <= tl.sum(is_group.to(tl.int32), axis=1), lowest, LOWEST_RANK)
    low = lowest.to(tl.int64) >> shift
    high = (highest.to(tl.int64) >> shift) + 1
    while tl.max(high - low) > 1:  # `low` is reached by as many, or lowest
        middles = between(low, high, FAN)
        reached = ranks[:, None, :] >= _rank_from(middles, shift[:, None])[:, :, None]
        low, high = narrow(low, high, middles, tl.sum(reached.to(tl.int32), axis=2) < count[:, None])
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
        middles = between(low, high, FAN)
        floors = _rank_from(middles, shift[:, None])
        most = GROUP * tl.exp2((unrank(floors) - best[:, None]) * scale[:, None])
        inside = tl.minimum(lighter[:, None, :], most[:, :, None])
        left_out = tl.sum(tl.where(ranks[:, None, :] >= floors[:, :, None], inside, masses[:, None, :]), axis=2)
        low, high = narrow(low, high, middles, left_out > spare[:, None])
    return tl.where(spare > 0, _rank_from(low, shift), LOWEST_RANK)


@triton.jit
@no_type_check
def floor_of(maxima, masses, moments, filters, shift, vocab_size, GROUP: tl.constexpr, FAN: tl.constexpr):
    """Find a rank below which no token matters to the cuts, by the summaries of groups."""
    best, scale, _ = moments
    top_k, top_p, min_p = filters
    floor = tl.full(best.shape, LOWEST_RANK, tl.int32)
    by_top_p = (top_p < 1) & (top_k == 0)  # top-p counts all that top-k leaves
    if tl.max(by_top_p.to(tl.int32)) > 0:
        by_mass = _floor_by_mass(maxima, masses, moments, top_p, shift, vocab_size, GROUP, FAN)
        floor = tl.where(by_top_p, by_mass, floor)
    if tl.max(min_p) > 0:
        distance = tl.log2(tl.maximum(min_p, 1e-30)) / scale
        below = best + distance - 2.0**-18 * (tl.abs(best) + tl.abs(distance))
        floor = tl.where(min_p > 0, tl.maximum(floor, rank(below)), floor)
    if tl.max(top_k) > 0:
        floor = tl.where(top_k > 0, _floor_by_count(rank(maxima), rank(best), top_k, shift, FAN), floor)
    return floor


@triton.jit
@no_type_check
def _append(list_ptr, size, mask, values, ROOM: tl.constexpr):
    """Write masked values [ROWS, COUNT] behind the `size` entries of lists; count all entries, [ROWS]."""
    entry = size[:, None] + tl.cumsum(mask.to(tl.int32), axis=1) - 1
    tl.store(list_ptr[:, None] + entry, values, mask=mask & (entry < ROOM))
    return size + tl.sum(mask.to(tl.int32), axis=1)


@triton.jit
@no_type_check
def _read_parts(rows, list_ptr, start, num_listed, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Load COUNT entries of lists from entry `start` on, which number parts of SIZE tokens: (numbers, tokens, logits).

    Numbers are [ROWS, COUNT], the others [ROWS, COUNT, SIZE]. Beyond the list and the vocabulary logits are NaN.
    """
    entries = start + tl.arange(0, COUNT)[None, :]  # [1, COUNT]
    mask = entries < num_listed[:, None]  # [ROWS, COUNT]
    numbers = tl.load(list_ptr[:, None] + entries, mask=mask, other=0).to(tl.int32)
    tokens = numbers[:, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    mask = mask[:, :, None] & (tokens < rows.vocab_size)
    return numbers, tokens, tl.where(mask, logits_at(rows, tokens, mask), float("nan"))


@triton.jit
@no_type_check
def list_tokens(
    rows, wanted, floor, list_ptr, GROUP: tl.constexpr, PART: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr
):
    """List the tokens of the wanted groups [ROWS, GROUPS] that reach `floor`, ascending, and count them, [ROWS].

    list_ptr: i64 [ROWS], where a row's workspace begins, with its list of at most MOST_LISTED tokens. Behind it are the
    lists of the wanted groups and of the parts of PART tokens with such a token, so that few tokens are
    looked at one by one. PER groups, then PARTS parts are read at once.
    """
    first = rows.first[:, :, None]
    rows = LogitRows(rows.logits_ptr, rows.adjusted_ptr, rows.is_adjusted[:, :, None], first, rows.vocab_size)
    num_rows: tl.constexpr = floor.shape[0]
    per_group: tl.constexpr = GROUP // PART
    least = unrank(tl.maximum(floor, LOWEST_NUMBER))[:, None, None]  # -inf for the lowest floor
    none = tl.full(floor.shape, 0, tl.int32)
    groups = tl.arange(0, wanted.shape[1])[None, :] + none[:, None]
    groups_ptr = list_ptr + MOST_LISTED
    parts_ptr = groups_ptr + MOST_GROUPS
    num_groups = _append(groups_ptr, none, wanted, groups, MOST_GROUPS)
    tl.debug_barrier()
    num_parts = none
    for start in range(0, tl.max(num_groups), PER):
        numbers, _, logits = _read_parts(rows, groups_ptr, start, num_groups, PER, GROUP)
        reach = tl.reshape((logits >= least).to(tl.int32), (num_rows, PER, per_group, PART))
        reach = tl.reshape(tl.max(reach, axis=3) > 0, (num_rows, PER * per_group))
        parts = numbers[:, :, None] * per_group + tl.arange(0, per_group)[None, None, :]  # [ROWS, PER, per_group]
        num_parts = _append(parts_ptr, num_parts, reach, tl.reshape(parts, reach.shape), MOST_LISTED)
    tl.debug_barrier()
    num_listed = tl.where(num_parts > MOST_LISTED, num_parts, 0)  # at least as many tokens reach the floor
    num_parts = tl.where(num_parts > MOST_LISTED, 0, num_parts)
    for start in range(0, tl.max(num_parts), PARTS):
        _, tokens, logits = _read_parts(rows, parts_ptr, start, num_parts, PARTS, PART)
        reach = tl.reshape(logits >= least, (num_rows, PARTS * PART))
        entries = (rank(logits).to(tl.int64) << 32) | tokens
        num_listed = _append(list_ptr, num_listed, reach, tl.reshape(entries, reach.shape), MOST_LISTED)
    tl.debug_barrier()
    return num_listed
