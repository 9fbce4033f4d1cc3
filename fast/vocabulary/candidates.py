"""Tokens on which a row's cut depends: a lower bound on their rank from the groups' summaries, and their list."""

from typing import no_type_check

import triton
import triton.language as tl

from specsim.fast.vocabulary.filters import between, narrow
from specsim.fast.vocabulary.logit_rows import LogitRows, logits_at
from specsim.fast.vocabulary.summaries import LOWEST_RANK, rank, unrank, weights_of

MOST_GROUPS = tl.constexpr(256)  # that are read again to list their tokens
MOST_LISTED = tl.constexpr(4096)  # tokens, and parts of groups, that a list has room for
ENTRIES = tl.constexpr(4096 + 256 + 4096)  # of a row's workspace: tokens, groups and parts
LOWEST_NUMBER = tl.constexpr(-0x7F800001)  # rank of -inf
NEARLY_ALL = tl.constexpr(1 - 2.0**-16)  # of the mass that a floor may leave out: more than the sums' roundings


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
def _append(list_ptr, found, kept, values, ROOM: tl.constexpr):
    """Write the kept of some values [ROWS, COUNT] behind the `found` entries of lists; count all entries, [ROWS]."""
    place = found[:, None] + tl.cumsum(kept.to(tl.int32), axis=1) - 1
    tl.store(list_ptr[:, None] + place, values, mask=kept & (place < ROOM))
    return found + tl.sum(kept.to(tl.int32), axis=1)


@triton.jit
@no_type_check
def _read_parts(rows, list_ptr, start, found, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Load COUNT entries of lists from entry `start` on, which number parts of SIZE tokens: (numbers, tokens, logits).

    Numbers are [ROWS, COUNT], the others [ROWS, COUNT, SIZE]. Beyond the list and the vocabulary logits are NaN.
    """
    entries = start + tl.arange(0, COUNT)[None, :]  # [1, COUNT]
    mask = entries < found[:, None]  # [ROWS, COUNT]
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
    found = tl.where(num_parts > MOST_LISTED, num_parts, 0)  # at least as many tokens reach the floor
    num_parts = tl.where(num_parts > MOST_LISTED, 0, num_parts)
    for start in range(0, tl.max(num_parts), PARTS):
        _, tokens, logits = _read_parts(rows, parts_ptr, start, num_parts, PARTS, PART)
        reach = tl.reshape(logits >= least, (num_rows, PARTS * PART))
        entries = (rank(logits).to(tl.int64) << 32) | tokens
        found = _append(list_ptr, found, reach, tl.reshape(entries, reach.shape), MOST_LISTED)
    tl.debug_barrier()
    return found
