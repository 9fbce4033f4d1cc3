"""Exercises of notebook 02: why speculate."""

from specsim.course.exercise import Exercise, Mistake


def free_tokens(parameters: float, bytes_per_parameter: float, bandwidth: float, peak_flops: float) -> float:
    """Compute the number of tokens in a forward pass at which the arithmetic takes as long as reading the weights.

    bandwidth: bytes per second. peak_flops: operations per second; a multiplication and an addition are two.
    """
    # begin answer
    reading = parameters * bytes_per_parameter / bandwidth
    arithmetic_of_one_token = 2 * parameters / peak_flops
    return reading / arithmetic_of_one_token
    # end answer


def _one_operation(parameters: float, bytes_per_parameter: float, bandwidth: float, peak_flops: float) -> float:
    return (parameters * bytes_per_parameter / bandwidth) / (parameters / peak_flops)


def _inverse(parameters: float, bytes_per_parameter: float, bandwidth: float, peak_flops: float) -> float:
    return (2 * parameters / peak_flops) / (parameters * bytes_per_parameter / bandwidth)


def _no_bytes(parameters: float, _bytes_per_parameter: float, bandwidth: float, peak_flops: float) -> float:
    return (parameters / bandwidth) / (2 * parameters / peak_flops)


FREE_TOKENS = Exercise(
    "02-1",
    "Write `free_tokens`: the number of tokens in one forward pass at which the arithmetic takes as long as reading "
    "the weights. Every parameter is read once for all tokens. Every token needs one multiplication and one addition "
    "for each parameter.\n\n"
    "Hint: compute the seconds of both. Only one of them grows with the number of tokens.",
    free_tokens,
    ((8.0e9, 2, 3.35e12, 989.4e12), (70.6e9, 1, 4.8e12, 1978.9e12), (1.0e9, 4, 1.0e12, 50.0e12)),
    (
        Mistake(
            _one_operation,
            "That is twice too many: a token needs two operations for each parameter, not one.",
        ),
        Mistake(_inverse, "The ratio is upside down: divide the time of reading by the arithmetic of one token."),
        Mistake(
            _no_bytes,
            "The bandwidth is in bytes per second, so the number of parameters must be turned into bytes first.",
        ),
    ),
    "Reading takes parameters · bytes / bandwidth, one token's arithmetic 2 · parameters / peak. The size of the model "
    "cancels: the number depends on the GPU and the number format alone.",
)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Compute the mean number of tokens of a round with a chain of gamma drafts, bonus token included.

    alpha: probability that a draft is accepted, given that all before it are.
    """
    # begin answer
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))
    # end answer


def _independent(alpha: float, gamma: int) -> float:
    return 1 + alpha * gamma


def _no_bonus(alpha: float, gamma: int) -> float:
    return float(sum(alpha**accepted for accepted in range(1, gamma + 1)))


def _all_or_nothing(alpha: float, gamma: int) -> float:
    return 1 + gamma * alpha**gamma


EXPECTED_TOKENS = Exercise(
    "02-2",
    "Write `expected_tokens`. A round proposes a chain of gamma drafts. Each is accepted with probability alpha if all "
    "drafts before it are accepted; after a rejection no later draft counts. Every round also gives one token of the "
    "target. Return the mean number of tokens, also for alpha 0 and "
    "1.\n\n"
    "Hint: the mean of a count is the sum of the probabilities that it is at least 1, at least 2, and so on.",
    expected_tokens,
    ((0.8, 3), (0.5, 5), (0.9, 1), (1.0, 4), (0.0, 4), (0.7, 0)),
    (
        Mistake(
            _independent,
            "That counts every draft with probability alpha. Draft i is accepted only if all drafts before it are, "
            "which has probability alpha to the power of i.",
        ),
        Mistake(_no_bonus, "The bonus token is missing: a round gives one token even if no draft is accepted."),
        Mistake(
            _all_or_nothing,
            "That accepts either all drafts or none. The drafts before the first rejection count too.",
        ),
    ),
    "At least i drafts are accepted with probability alpha^i. Together with the bonus token: 1 + α + … + α^γ.",
)


def best_gamma(alpha: float, cost_ratio: float, most: int) -> int:
    """Find the number of drafts, from 0 to most, with the largest speed-up; 0 where none is faster.

    cost_ratio: time of one draft, as a share of the time of a forward pass of the target.
    """
    # begin answer
    speedups = [sum(alpha**i for i in range(gamma + 1)) / (gamma * cost_ratio + 1) for gamma in range(most + 1)]
    return speedups.index(max(speedups))
    # end answer


def _most(_alpha: float, _cost_ratio: float, most: int) -> int:
    return most


def _never_zero(alpha: float, cost_ratio: float, most: int) -> int:
    return max(1, best_gamma(alpha, cost_ratio, most))


def _still_faster(alpha: float, cost_ratio: float, most: int) -> int:
    faster = [n for n in range(1, most + 1) if sum(alpha**i for i in range(n + 1)) / (n * cost_ratio + 1) > 1]
    return max(faster, default=0)


BEST_GAMMA = Exercise(
    "02-3",
    "Write `best_gamma`: the number of drafts with the largest speed-up, from 0 to `most`. A round of gamma drafts "
    "takes gamma · cost_ratio + 1 times as long as plain decoding takes for one token, and gives as many tokens as in "
    "Exercise 02-2.",
    best_gamma,
    ((0.8, 0.05, 16), (0.6, 0.2, 16), (0.3, 0.4, 16), (0.9, 0.02, 8), (0.5, 0.5, 4)),
    (
        Mistake(
            _most,
            "The longest chain gives the most tokens, but not the most tokens per second: late drafts are seldom "
            "accepted, and each costs as much as the first.",
        ),
        Mistake(
            _never_zero,
            "Where a draft costs more than it gains, the best number is 0: plain decoding is faster than any chain.",
        ),
        Mistake(
            _still_faster,
            "That is the longest chain which is still faster than plain decoding. The best one is shorter.",
        ),
    ),
    "The next draft is worth its time as long as it adds more tokens, in proportion, than time. If α ≤ c not even the "
    "first one is.",
)

EXERCISES = (FREE_TOKENS, EXPECTED_TOKENS, BEST_GAMMA)
