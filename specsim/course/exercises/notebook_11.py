"""Exercises of notebook 11: serving."""

from math import ceil

from specsim.course.exercise import solves


# With speculation TPOT falls below 1: tokens of one round arrive in the same step. The gap between deliveries does not
# fall. Users of a chat see the second, totals show the first.
# - `sum(number for _, number in deliveries)` → `len(deliveries)`: That is the time between two deliveries (ITL). A
#   round delivers several tokens at once, so a token takes less than the time between deliveries.
# - `in deliveries) - 1` → `in deliveries)`: The first token is the start of the measurement: it took the time to the
#   first token (TTFT). Divide by the number of the other tokens.
# - `deliveries[-1][0] - deliveries[0][0]` → `len(deliveries) - 1`: The number of deliveries is not the number of steps.
#   A request that waits in between has steps without a delivery.
# - `in deliveries) - 1` → `in deliveries[1:])`: The first delivery may hold several tokens, and only the first *token*
#   is left out. Count the others of that delivery too.
# - `steps /` → `(steps + 1) /`: Both ends were counted as steps. From step 5 to step 11 there are 6 steps, not 7.
# - `deliveries[-1][0] - deliveries[0][0]` → `deliveries[-1][0]`: The steps were counted from step 0. The time before
#   the first delivery is the TTFT.
@solves("11-1", ([(0, 1), (1, 1), (2, 4), (3, 1)],), ([(5, 4), (10, 1), (11, 3)],), ([(7, 1)],),
        ([(3, 4), (4, 4), (5, 4)],), ([(2, 3)],))  # fmt: skip
def time_per_token(deliveries: list[tuple[int, int]]) -> float:
    """Compute the mean number of steps that a token takes after the first delivery.

    deliveries: pairs of the step and the number of tokens that arrived in it, in order.
    """
    steps = deliveries[-1][0] - deliveries[0][0]
    tokens = sum(number for _, number in deliveries) - 1
    return steps / tokens if tokens else 0.0


# L + 2N columns, rounded up to whole pages. For a tree, N is replaced by what its lanes need, which is more: see
# `SpecConfig.reserved_columns`.
# - `2 * num_draft_tokens` → `num_draft_tokens`: That is enough for one round. Under `overlap` a second round begins
#   before the lengths are read, and it would write into another request's pages.
# - `ceil` → `int`: The last page must be reserved also if only a part of it is needed: round up.
# - `(ceil(seq_len / page_size) + ceil(2 * num_draft_tokens / page_size)) * page_size`: Drafts follow the committed
#   tokens in the same page. Add first, then round up once.
# - `ceil(columns / page_size)` → `(columns // page_size + 1)`: One page too many where the columns fill whole pages
#   exactly. Round up, but only if something is left.
# - `) * page_size` → `)`: That is the number of pages. Multiply it by the slots of a page.
# - `2 * num_draft_tokens` → `2 * (num_draft_tokens + 1)`: The root is one of the `num_draft_tokens` nodes already, so
#   nothing is added for it.
# - `seq_len + 2 * num_draft_tokens`: A pool hands out whole pages. Round up to a multiple of the page size.
@solves("11-2", (5, 4, 4), (8, 4, 16), (24, 4, 16), (3, 4, 1), (9, 6, 8), (9, 4, 8))
def slots_of_chain(seq_len: int, num_draft_tokens: int, page_size: int) -> int:
    """Compute the number of KV slots that a request with chains of drafts reserves: two rounds, in whole pages."""
    columns = seq_len + 2 * num_draft_tokens
    return ceil(columns / page_size) * page_size


# The latest arrival has the least KV to lose in most cases, and no request waits for ever: the oldest always runs.
# - `max(reversed(requests), key=lambda request: request[2])[0]`: A request of high priority was preempted although one
#   of lower priority was running. Compare priorities first.
# - `max(arrival` → `min(arrival`: The request that has waited longest was preempted. It has the most tokens, so most is
#   computed again, and under load it may never end.
# - `min(priority` → `max(priority`: A higher number is a higher priority. The victim is one of the lowest.
# - `[-1]` → `[0]`: Of two requests that arrived in the same step, the first one in the list was taken. `max` returns
#   the first of equals.
# - `return [` → `return max(`, `(lowest, last)][-1]` → `(lowest, last))`: Of two requests that arrived in the same
#   step, the larger id was taken. The later one in the list may have a smaller id.
# - `(priority, arrival) == (lowest, last)` → `priority == lowest`: The steps of arrival were not compared. The list
#   need not be in the order of arrival.
# - `[number for number, _, _ in requests].index(victim(requests))`: That is the request's place in the list. Return its
#   id, the first entry of its tuple.
@solves("11-3", ([(0, 0, 0), (1, 0, 1), (2, 0, 3), (3, 0, 3)],), ([(0, 0, 0), (1, 1, 1), (2, 0, 2), (3, 1, 3)],),
        ([(4, 5, 9)],), ([(7, 2, 4), (8, -1, 4), (9, -1, 2)],), ([(9, 0, 3), (2, 0, 3)],))  # fmt: skip
def victim(requests: list[tuple[int, int, int]]) -> int:
    """Choose the request that loses its slots: of the lowest priority, the one that arrived last.

    requests: tuples of id, priority (higher is more important) and step of arrival. Of two that arrived in the same
    step, the later one in the list is the victim.
    """
    lowest = min(priority for _, priority, _ in requests)
    last = max(arrival for _, priority, arrival in requests if priority == lowest)
    return [number for number, priority, arrival in requests if (priority, arrival) == (lowest, last)][-1]
