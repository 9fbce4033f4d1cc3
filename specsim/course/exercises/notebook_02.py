"""Exercises of notebook 02: why speculate."""

from specsim.course.exercise import solves


# Reading takes parameters · bytes / bandwidth, one token's arithmetic 2 · parameters / peak. The size of the model
# cancels: the number depends on the GPU and the number format alone.
# - `2 * parameters` → `parameters`: That is twice too many: a token needs two operations for each parameter, not one.
# - `reading / arithmetic_of_one_token` → `arithmetic_of_one_token / reading`: The ratio is upside down: divide the time
#   of reading by the arithmetic of one token.
# - `parameters * bytes_per_parameter` → `parameters`: The bandwidth is in bytes per second, so the number of parameters
#   must be turned into bytes first.
@solves("02-1", (8.0e9, 2, 3.35e12, 989.4e12), (70.6e9, 1, 4.8e12, 1978.9e12), (1.0e9, 4, 1.0e12, 50.0e12))
def free_tokens(parameters: float, bytes_per_parameter: float, bandwidth: float, peak_flops: float) -> float:
    """Compute the number of tokens in a forward pass at which the arithmetic takes as long as reading the weights.

    bandwidth: bytes per second. peak_flops: operations per second; a multiplication and an addition are two.
    """
    reading = parameters * bytes_per_parameter / bandwidth
    arithmetic_of_one_token = 2 * parameters / peak_flops
    return reading / arithmetic_of_one_token


# At least i drafts are accepted with probability alpha^i. Together with the bonus token: 1 + α + … + α^γ.
# - `1 + alpha * gamma`: That counts every draft with probability alpha. Draft i is accepted only if all drafts before
#   it are, which has probability alpha to the power of i.
# - `(gamma + 1)` → `(1, gamma + 1)`: The bonus token is missing: a round gives one token even if no draft is accepted.
# - `1 + gamma * alpha**gamma`: That accepts either all drafts or none. The drafts before the first rejection count too.
@solves("02-2", (0.8, 3), (0.5, 5), (0.9, 1), (1.0, 4), (0.0, 4), (0.7, 0))
def expected_tokens(alpha: float, gamma: int) -> float:
    """Compute the mean number of tokens of a round with a chain of gamma drafts, bonus token included.

    alpha: probability that a draft is accepted, given that all before it are.
    """
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))


# The next draft is worth its time as long as it adds more tokens, in proportion, than time. If α ≤ c not even the first
# one is.
# - `most`: The longest chain gives the most tokens, but not the most tokens per second: late drafts are seldom
#   accepted, and each costs as much as the first.
# - `max(1, best_gamma(alpha, cost_ratio, most))`: Where a draft costs more than it gains, the best number is 0: plain
#   decoding is faster than any chain.
# - `speedups.index(max(speedups))` → `max(n for n, speedup in enumerate(speedups) if n == 0 or speedup > 1)`: That is
#   the longest chain which is still faster than plain decoding. The best one is shorter.
@solves("02-3", (0.8, 0.05, 16), (0.6, 0.2, 16), (0.3, 0.4, 16), (0.9, 0.02, 8), (0.5, 0.5, 4))
def best_gamma(alpha: float, cost_ratio: float, most: int) -> int:
    """Find the number of drafts, from 0 to most, with the largest speed-up; 0 where none is faster.

    cost_ratio: time of one draft, as a share of the time of a forward pass of the target.
    """
    speedups = [sum(alpha**i for i in range(gamma + 1)) / (gamma * cost_ratio + 1) for gamma in range(most + 1)]
    return speedups.index(max(speedups))
