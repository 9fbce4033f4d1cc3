"""Exercises of notebook 13: does it pay?"""

import math

from specsim.course.exercise import Exercise, Mistake


def break_even(plain: float, draft: float, verify: float, extend: float) -> float:
    """Compute the accept length at which decoding with drafts is as fast as plain decoding.

    plain: time of a step of plain decoding. draft, verify, extend: times of the parts of a round, in the same unit.
    """
    # begin answer
    return (draft + verify + extend) / plain
    # end answer


def _target_only(plain: float, _draft: float, verify: float, _extend: float) -> float:
    return verify / plain


def _drafts(plain: float, draft: float, verify: float, extend: float) -> float:
    return (draft + verify + extend) / plain - 1


def _drafter_only(plain: float, draft: float, _verify: float, extend: float) -> float:
    return 1 + (draft + extend) / plain


def _inverse(plain: float, draft: float, verify: float, extend: float) -> float:
    return plain / (draft + verify + extend)


def _no_extend(plain: float, draft: float, verify: float, _extend: float) -> float:
    return (draft + verify) / plain


def _bonus_added(plain: float, draft: float, verify: float, extend: float) -> float:
    return (draft + verify + extend) / plain + 1


def _difference(plain: float, draft: float, verify: float, extend: float) -> float:
    return draft + verify + extend - plain


BREAK_EVEN = Exercise(
    "13-1",
    "Write `break_even`: the accept length at which a round with drafts gives as many tokens per second as plain "
    "decoding. A step of plain decoding gives one token. A round consists of the drafting, the target's pass and the "
    "drafter's extension, and gives as many tokens as its accept length, bonus token included.\n\n"
    "Hint: write down the tokens per second of both.",
    break_even,
    ((8.2, 1.1, 8.2, 0.4), (23.9, 2.4, 55.3, 2.3), (8.0, 0.0, 8.0, 0.0), (10.0, 5.0, 12.0, 3.0)),
    (
        Mistake(
            _target_only,
            "That is the time of the target's pass alone. In every round the drafter runs too, before and after it.",
        ),
        Mistake(
            _drafts,
            "That is the number of accepted drafts. The accept length counts the bonus token as well, so it is larger "
            "by one.",
        ),
        Mistake(
            _drafter_only,
            "That takes verification as free, as the formula of notebook 02 does. In a large batch the target's pass "
            "over all drafts takes much longer than a step of plain decoding.",
        ),
        Mistake(
            _no_extend, "The drafter's extension is missing: it reads the accepted tokens at the end of the round."
        ),
        Mistake(_bonus_added, "The accept length counts the bonus token already. Add nothing to it."),
        Mistake(
            _difference, "That is the additional time of a round. Ask how many plain steps fit into the whole round."
        ),
        Mistake(_inverse, "The ratio is upside down: a longer round needs more tokens to pay, not fewer."),
    ),
    "A round that takes as long as r steps of plain decoding has to give r tokens. It pays if the accept length is "
    "larger than that.",
)


def goodput(requests: list[tuple[float, float, int]], ttft: float, tpot: float, seconds: float) -> float:
    """Compute the requests per second that stay within both bounds.

    requests: (time to the first token, time to the last token, number of output tokens) of each, times in ms. ttft,
    tpot: largest allowed values, in ms. seconds: duration of the run.
    """
    # begin answer
    good = 0
    for first, last, tokens in requests:
        per_token = (last - first) / (tokens - 1) if tokens > 1 else 0.0
        good += first <= ttft and per_token <= tpot
    return good / seconds
    # end answer


Requests = list[tuple[float, float, int]]


def _by_means(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    mean_first = sum(first for first, _, _ in requests) / len(requests)
    per_token = [(last - first) / (tokens - 1) for first, last, tokens in requests if tokens > 1]
    is_good = mean_first <= ttft and sum(per_token) <= tpot * len(per_token)
    return len(requests) / seconds if is_good else 0.0


def _share(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    return goodput(requests, ttft, tpot, seconds) * seconds / len(requests)


def _from_arrival(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    return sum(first <= ttft and last / tokens <= tpot for first, last, tokens in requests) / seconds


def _one_token_is_late(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    per_token = [(last - first) / (tokens - 1) if tokens > 1 else math.nan for first, last, tokens in requests]
    return sum(request[0] <= ttft and each <= tpot for request, each in zip(requests, per_token, strict=True)) / seconds


def _either(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    good = [first <= ttft or (last - first) <= tpot * (tokens - 1) for first, last, tokens in requests]
    return sum(good) / seconds


def _good(requests: Requests, ttft: float, tpot: float) -> Requests:
    return [each for each in requests if each[0] <= ttft and each[1] - each[0] <= tpot * (each[2] - 1)]


def _below_bounds(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    per_token = [(last - first) / (tokens - 1) if tokens > 1 else 0.0 for first, last, tokens in requests]
    return sum(request[0] < ttft and each < tpot for request, each in zip(requests, per_token, strict=True)) / seconds


def _number(requests: Requests, ttft: float, tpot: float, _seconds: float) -> float:
    return len(_good(requests, ttft, tpot))


def _tokens(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    return sum(tokens for _, _, tokens in _good(requests, ttft, tpot)) / seconds


def _all_tokens(requests: Requests, ttft: float, tpot: float, seconds: float) -> float:
    return sum(first <= ttft and (last - first) / tokens <= tpot for first, last, tokens in requests) / seconds


GOODPUT = Exercise(
    "13-2",
    "Write `goodput`: the number of requests per second that stay within both bounds. The TPOT of a request is the "
    "time from its first token to its last one, divided by the number of tokens after the first.\n\n"
    "A request that puts out a single token has no TPOT. It counts as good if its TTFT is within the bound. A value "
    "that equals its bound is within it.",
    goodput,
    (
        ([(100.0, 1090.0, 100), (100.0, 2100.0, 101), (400.0, 1390.0, 100)], 200.0, 12.0, 2.0),
        ([(100.0, 100.0, 1), (300.0, 300.0, 1), (100.0, 120.0, 2)], 200.0, 12.0, 1.5),
        ([(190.0, 310.0, 11), (50.0, 290.0, 21)], 200.0, 12.0, 4.0),
        ([(10.0, 1010.0, 11), (10.0, 20.0, 11), (10.0, 20.0, 11)], 200.0, 50.0, 1.0),
    ),
    (
        Mistake(
            _by_means,
            "That compares means with the bounds. A mean within its bound does not say that any single request is: "
            "count the requests.",
        ),
        Mistake(_share, "That is the share of good requests. Goodput is a rate: divide their number by the seconds."),
        Mistake(
            _from_arrival,
            "That divides the whole time by all tokens. The wait for the first token does not belong to the TPOT, nor "
            "does that token.",
        ),
        Mistake(
            _one_token_is_late,
            "A request of one token has no TPOT, so no bound on it can be exceeded. With nan in its place every "
            "comparison is false, and the request is lost.",
        ),
        Mistake(_below_bounds, "A value that equals its bound is within it: compare with <=."),
        Mistake(_number, "That is the number of good requests. Goodput is a rate: divide it by the seconds."),
        Mistake(_tokens, "That counts the tokens of the good requests. Goodput counts the requests."),
        Mistake(
            _all_tokens,
            "The TPOT is divided by the number of tokens after the first, which is one less than all.",
        ),
        Mistake(_either, "A request is good only if it stays within both bounds, not within one of them."),
    ),
    "Count the requests for which every bound holds, and divide by the duration. It is the goodput of vLLM's "
    "benchmark.",
)


def schedule(sizes: list[int], speeds: list[list[float]]) -> list[tuple[int, int, int]]:
    """Choose the number of drafts for every batch size, as ranges (lowest size, highest size, drafts).

    speeds[i][n]: tokens per second with sizes[i] requests and n drafts.
    """
    # begin answer
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
    # end answer


Ranges = list[tuple[int, int, int]]


def _separate(sizes: list[int], choices: list[int]) -> Ranges:
    """Make a range for each size."""
    lows = [1, *(size + 1 for size in sizes)]
    return list(zip(lows, sizes, choices, strict=False))


def _joined(sizes: list[int], choices: list[int]) -> Ranges:
    """Make a range for each size, and join neighbours with the same choice."""
    ranges: Ranges = []
    for low, high, drafts in _separate(sizes, choices):
        first = ranges.pop()[0] if ranges and ranges[-1][2] == drafts else low
        ranges.append((first, high, drafts))
    return ranges


def _fewest(row: list[float]) -> int:
    return next(n for n, speed in enumerate(row) if speed >= 0.99 * max(row))


def _fastest(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    return _joined(sizes, [row.index(max(row)) for row in speeds])


def _one_for_all(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    return [(1, sizes[-1], _fewest([sum(row[n] for row in speeds) for n in range(len(speeds[0]))]))]


def _not_joined(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    return _separate(sizes, [_fewest(row) for row in speeds])


def _barely_faster(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    return _joined(sizes, [max(n for n, speed in enumerate(row) if speed >= 0.99 * row[0]) for row in speeds])


def _most_drafts(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    return _joined(sizes, [max(n for n, speed in enumerate(row) if speed >= 0.99 * max(row)) for row in speeds])


def _from_first_size(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    (_, high, drafts), *others = schedule(sizes, speeds)
    return [(sizes[0], high, drafts), *others]


def _next_smaller(sizes: list[int], speeds: list[list[float]]) -> Ranges:
    ranges: Ranges = []
    for index, row in enumerate(speeds):
        drafts = _fewest(row)
        high = sizes[index + 1] - 1 if index + 1 < len(sizes) else sizes[index]
        first = ranges.pop()[0] if ranges and ranges[-1][2] == drafts else sizes[index] if index else 1
        ranges.append((first, high, drafts))
    return ranges


SCHEDULE = Exercise(
    "13-3",
    "Write `schedule`. It receives batch sizes in ascending order, and for each of them a list: entry n is the tokens "
    "per second with n drafts. Choose for every size the *fewest* drafts that reach at least 99 % of the best "
    "entry.\n\n"
    "Return ranges (lowest size, highest size, drafts). The first range begins at 1. A size between two listed ones "
    "gets the choice of the next larger one. Neighbours with the same choice are one range.",
    schedule,
    (
        ([1, 8, 64, 256], [[10, 17, 22, 24], [70, 110, 130, 129], [400, 520, 521, 470], [800, 790, 700, 600]]),
        ([4, 16], [[10, 20, 30], [30, 40, 50]]),
        ([1], [[100, 100.5, 101]]),
        ([2, 4, 8], [[50, 90], [98, 97], [150, 190]]),
    ),
    (
        Mistake(
            _fastest,
            "That takes the fastest setting, however small its lead. No forecast is exact to 1 %, and fewer drafts "
            "take less memory and arithmetic.",
        ),
        Mistake(
            _one_for_all,
            "That is one number of drafts for all sizes. The best number falls as the batch grows, which is the reason "
            "for a schedule.",
        ),
        Mistake(
            _most_drafts,
            "Those are the most drafts that reach 99 % of the best entry. Take the fewest: they cost less for the same "
            "speed.",
        ),
        Mistake(_from_first_size, "The first range begins at 1, also if the smallest listed size is larger."),
        Mistake(
            _next_smaller,
            "A size between two listed ones got the choice of the smaller one. Take that of the larger one: it has "
            "fewer drafts, which is the safer choice.",
        ),
        Mistake(_not_joined, "The choices are right. Join neighbouring ranges that have the same number of drafts."),
        Mistake(
            _barely_faster,
            "Those are the most drafts that are still about as fast as plain decoding. Compare with the best setting.",
        ),
    ),
    "Engines read such ranges from a file. specsim plan also weighs what a range more costs against what it saves.",
)

EXERCISES = (BREAK_EVEN, GOODPUT, SCHEDULE)
