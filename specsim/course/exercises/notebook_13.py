"""Exercises of notebook 13: does it pay?"""

from specsim.course.exercise import solves


# A round that takes as long as r steps of plain decoding has to give r tokens. It pays if the accept length is larger
# than that.
# - `verify / plain`: That is the time of the target's pass alone. In every round the drafter runs too, before and after
#   it.
# - `(draft + verify + extend) / plain - 1`: That is the number of accepted drafts. The accept length counts the bonus
#   token as well, so it is larger by one.
# - `1 + (draft + extend) / plain`: That takes verification as free, as the formula of notebook 02 does. In a large
#   batch the target's pass over all drafts takes much longer than a step of plain decoding.
# - `(draft + verify) / plain`: The drafter's extension is missing: it reads the accepted tokens at the end of the
#   round.
# - `(draft + verify + extend) / plain + 1`: The accept length counts the bonus token already. Add nothing to it.
# - `draft + verify + extend - plain`: That is the additional time of a round. Ask how many plain steps fit into the
#   whole round.
# - `plain / (draft + verify + extend)`: The ratio is upside down: a longer round needs more tokens to pay, not fewer.
@solves("13-1", (8.2, 1.1, 8.2, 0.4), (23.9, 2.4, 55.3, 2.3), (8.0, 0.0, 8.0, 0.0), (10.0, 5.0, 12.0, 3.0))
def break_even(plain: float, draft: float, verify: float, extend: float) -> float:
    """Compute the accept length at which decoding with drafts is as fast as plain decoding.

    plain: time of a step of plain decoding. draft, verify, extend: times of the parts of a round, in the same unit.
    """
    return (draft + verify + extend) / plain


def are_good_by_means(requests: list[tuple[float, float, int]], ttft: float, tpot: float) -> bool:
    """Compare the mean TTFT and the mean TPOT with the bounds."""
    per_token = [(last - first) / (tokens - 1) for first, last, tokens in requests if tokens > 1]
    return sum(first for first, _, _ in requests) <= ttft * len(requests) and sum(per_token) <= tpot * len(per_token)


# Count the requests for which every bound holds, and divide by the duration. It is the goodput of vLLM's benchmark.
# - `are_good_by_means(requests, ttft, tpot) * len(requests) / seconds`: That compares means with the bounds. A mean
#   within its bound does not say that any single request is: count the requests.
# - `good / seconds` → `good / len(requests)`: That is the share of good requests. Goodput is a rate: divide their
#   number by the seconds.
# - `(last - first) / (tokens - 1) if tokens > 1 else 0.0` → `last / tokens`: That divides the whole time by all tokens.
#   The wait for the first token does not belong to the TPOT, nor does that token.
# - `else 0.0` → `else float("nan")`: A request of one token has no TPOT, so no bound on it can be exceeded. With nan in
#   its place every comparison is false, and the request is lost.
# - `<=` → `<`: A value that equals its bound is within it: compare with <=.
# - `good / seconds` → `good`: That is the number of good requests. Goodput is a rate: divide it by the seconds.
# - `first <= ttft and per_token <= tpot` → `tokens * (first <= ttft and per_token <= tpot)`: That counts the tokens of
#   the good requests. Goodput counts the requests.
# - `(last - first) / (tokens - 1) if tokens > 1 else 0.0` → `(last - first) / tokens`: The TPOT is divided by the
#   number of tokens after the first, which is one less than all.
# - `<= ttft and` → `<= ttft or`: A request is good only if it stays within both bounds, not within one of them.
@solves("13-2", ([(100.0, 1090.0, 100), (100.0, 2100.0, 101), (400.0, 1390.0, 100)], 200.0, 12.0, 2.0),
        ([(100.0, 100.0, 1), (300.0, 300.0, 1), (100.0, 120.0, 2)], 200.0, 12.0, 1.5),
        ([(190.0, 310.0, 11), (50.0, 290.0, 21)], 200.0, 12.0, 4.0),
        ([(10.0, 1010.0, 11), (10.0, 20.0, 11), (10.0, 20.0, 11)], 200.0, 50.0, 1.0))  # fmt: skip
def goodput(requests: list[tuple[float, float, int]], ttft: float, tpot: float, seconds: float) -> float:
    """Compute the requests per second that stay within both bounds.

    requests: (time to the first token, time to the last token, number of output tokens) of each, times in ms. ttft,
    tpot: largest allowed values, in ms. seconds: duration of the run.
    """
    good = 0
    for first, last, tokens in requests:
        per_token = (last - first) / (tokens - 1) if tokens > 1 else 0.0
        good += first <= ttft and per_token <= tpot
    return good / seconds


# Engines read such ranges from a file. specsim plan also weighs what a range more costs against what it saves.
# - `next(n for n, speed in enumerate(row) if speed >= 0.99 * max(row))` → `row.index(max(row))`: That takes the fastest
#   setting, however small its lead. No forecast is exact to 1 %, and fewer drafts take less memory and arithmetic.
# - `schedule(sizes[-1:], [[sum(column) for column in zip(*speeds)]])`: That is one number of drafts for all sizes. The
#   best number falls as the batch grows, which is the reason for a schedule.
# - `next(n for` → `max(n for`: Those are the most drafts that reach 99 % of the best entry. Take the fewest: they cost
#   less for the same speed.
# - `low = 1` → `low = sizes[0]`: The first range begins at 1, also if the smallest listed size is larger.
# - `schedule([*(size - 1 for size in sizes[1:]), sizes[-1]], speeds)`: A size between two listed ones got the choice of
#   the smaller one. Take that of the larger one: it has fewer drafts, which is the safer choice.
# - `ranges and` → `False and`: The choices are right. Join neighbouring ranges that have the same number of drafts.
# - `next(n for` → `max(n for`, `max(row)` → `row[0]`: Those are the most drafts that are still about as fast as plain
#   decoding. Compare with the best setting.
@solves("13-3", ([1, 8, 64, 256], [[10, 17, 22, 24], [70, 110, 130, 129], [400, 520, 521, 470], [800, 790, 700, 600]]),
        ([4, 16], [[10, 20, 30], [30, 40, 50]]), ([1], [[100, 100.5, 101]]),
        ([2, 4, 8], [[50, 90], [98, 97], [150, 190]]))  # fmt: skip
def schedule(sizes: list[int], speeds: list[list[float]]) -> list[tuple[int, int, int]]:
    """Choose the number of drafts for every batch size, as ranges (lowest size, highest size, drafts).

    speeds[i][n]: tokens per second with sizes[i] requests and n drafts.
    """
    ranges: list[tuple[int, int, int]] = []
    low = 1
    for size, row in zip(sizes, speeds, strict=True):
        drafts = next(n for n, speed in enumerate(row) if speed >= 0.99 * max(row))
        if ranges and ranges[-1][2] == drafts:
            ranges[-1] = (ranges[-1][0], size, drafts)
        else:
            ranges.append((low, size, drafts))
        low = size + 1
    return ranges
