"""Exercises of notebook 14: reading a benchmark report."""

from specsim.course.exercise import solves


# The smallest K comes from the smallest accept length and the largest rate, the largest K from the opposite ends.
# - `fewest <= drafts <= largest` → `abs(1 + drafts * accept_rate - accept_length) < 1e-9`: That takes the printed
#   figures as exact, and calls a correct report impossible. Each of them stands for an interval.
# - `half - 1` → `half`: The accept length counts the bonus token, the accept rate does not: subtract 1 before you
#   divide.
# - `[round((accept_length - 1) / accept_rate)]`: That gives the nearest whole number whether it fits or not. Then no
#   report is ever impossible.
# - `(accept_rate + half)` → `(accept_rate - half)`, `+ half - 1) / (accept_rate - half)` →
#   `+ half - 1) / (accept_rate + half)`: Both figures were taken at the same end. K is smallest where the accept length
#   is smallest and the rate largest.
# - `0.005` → `0.01`, `(accept_rate - half)` → `(accept_rate - half or 1e-9)`: The intervals are twice too wide. A
#   figure with two decimals is rounded by at most 0.005, half of its last place.
@solves("14-1", (2.01, 0.34, 8), (2.05, 0.51, 8), (4.20, 0.40, 16), (1.10, 0.01, 16), (2.00, 1.00, 8), (3.02, 0.26, 16))
def numbers_of_drafts(accept_length: float, accept_rate: float, most: int) -> list[int]:
    """List the numbers of drafts, from 1 to most, for which both printed figures can be true.

    accept_length: tokens of a round, bonus token included. accept_rate: accepted over proposed drafts.
    """
    half = 0.005  # both figures are printed with two decimals
    fewest = (accept_length - half - 1) / (accept_rate + half)
    largest = (accept_length + half - 1) / (accept_rate - half)
    return [drafts for drafts in range(1, most + 1) if fewest <= drafts <= largest]


# This is Little's law: requests in flight = requests per second · time of a request. A throughput above this bound
# contradicts the latencies.
# - `clients * 1000 / tpot`: That is the rate between the first and the last token. Until its first token a request
#   gives nothing.
# - `clients * tokens` → `tokens`: That is the throughput of one client. All clients work at the same time.
# - `(tokens - 1) * tpot` → `tokens * tpot`: The first token comes after the TTFT, so only the tokens after it take a
#   TPOT each: one less than all.
# - `(e2e / 1000)` → `e2e`: That is tokens per millisecond: the latencies are in ms.
# - `clients * tokens` → `clients * (tokens - 1)`: The first token counts too. Only its time is another one, the TTFT.
# - `clients * tokens` → `clients`: That is requests per second. Each of them puts out `tokens` tokens.
@solves("14-2", (16, 26.53, 3.5028, 128), (1, 40.0, 8.0, 256), (8, 50.0, 10.0, 1), (64, 500.0, 12.0, 32))
def most_tokens_per_s(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    """Compute the largest output throughput, in tokens per second, that the latencies allow.

    clients: each has at most one request in flight. ttft, tpot: means in ms. tokens: output tokens of every request.
    """
    e2e = ttft + (tokens - 1) * tpot
    return clients * tokens / (e2e / 1000)


# Everything that is left out makes a server slower, so no correct report can exceed this bound.
# - `max(reading, arithmetic)` → `reading`: The arithmetic is missing. With many requests it takes longer than reading
#   the weights.
# - `requests * accept_length` → `accept_length`: That is the rate of one request. A round gives its tokens to every one
#   of the requests.
# - `parameters / bandwidth` → `parameters * requests / bandwidth`: The weights are read once for all requests, not once
#   for each. That is why servers batch.
# - `max(reading, arithmetic)` → `arithmetic`: The reading is missing. With few requests it takes longer than the
#   arithmetic.
# - `reading = 2 *` → `reading =`: A parameter has 2 bytes, so the weights are twice as many bytes.
# - `arithmetic = 2 *` → `arithmetic =`: A parameter takes two operations for each token: a product and a sum.
# - `requests * nodes` → `requests * accept_length`: The target computes every node that it verifies, also those that
#   are rejected afterwards.
# - `requests * accept_length` → `requests`: A round gives each request as many tokens as its accept length, not one.
# - `max(reading, arithmetic)` → `(reading + arithmetic)`: That adds both times. They can overlap completely, so a bound
#   may only count the longer one.
@solves("14-3", (1.8933, 1, 4, 7.5e9, 8.0e12, 2.25e15), (2.0, 64, 4, 7.5e9, 3.35e12, 9.894e14),
        (2.0, 256, 8, 7.5e9, 3.35e12, 9.894e14), (1.0, 1, 1, 70e9, 4.8e12, 9.894e14))  # fmt: skip
def most_by_hardware(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    """Compute the most tokens per second that the hardware allows, with 2 bytes for each parameter.

    nodes: tokens that the target reads in a round for each request, the root included. bandwidth: bytes per second.
    peak_flops: operations per second.
    """
    reading = 2 * parameters / bandwidth
    arithmetic = 2 * parameters * requests * nodes / peak_flops
    return requests * accept_length / max(reading, arithmetic)
