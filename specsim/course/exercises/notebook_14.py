"""Exercises of notebook 14: reading a benchmark report."""

from specsim.course.exercise import Exercise, Mistake


def numbers_of_drafts(accept_length: float, accept_rate: float, most: int) -> list[int]:
    """List the numbers of drafts, from 1 to most, for which both printed figures can be true.

    accept_length: tokens of a round, bonus token included. accept_rate: accepted over proposed drafts.
    """
    # begin answer
    half = 0.005  # both figures are printed with two decimals
    fewest = (accept_length - half - 1) / (accept_rate + half)
    largest = (accept_length + half - 1) / (accept_rate - half)
    return [drafts for drafts in range(1, most + 1) if fewest <= drafts <= largest]
    # end answer


def _as_exact(accept_length: float, accept_rate: float, most: int) -> list[int]:
    return [drafts for drafts in range(1, most + 1) if abs(1 + drafts * accept_rate - accept_length) < 1e-9]


def _no_bonus(accept_length: float, accept_rate: float, most: int) -> list[int]:
    return numbers_of_drafts(accept_length + 1, accept_rate, most)


def _nearest(accept_length: float, accept_rate: float, _most: int) -> list[int]:
    return [round((accept_length - 1) / accept_rate)]


def _same_ends(accept_length: float, accept_rate: float, most: int) -> list[int]:
    fewest, largest = ((accept_length + half - 1) / (accept_rate + half) for half in (-0.005, 0.005))
    return [drafts for drafts in range(1, most + 1) if fewest <= drafts <= largest]


def _whole_unit(accept_length: float, accept_rate: float, most: int) -> list[int]:
    ends = [(accept_length + unit - 1) / (accept_rate - unit or 1e-9) for unit in (-0.01, 0.01)]
    return [drafts for drafts in range(1, most + 1) if ends[0] <= drafts <= ends[1]]


NUMBERS_OF_DRAFTS = Exercise(
    "14-1",
    "Write `numbers_of_drafts`. A report prints an accept length and an accept rate, both with two decimals. A chain "
    "of K drafts was used in every round, so that the true figures satisfy accept length = 1 + K · accept rate. Return "
    "all K from 1 to `most` for which both printed figures can be true; an empty list says that they contradict each "
    "other.\n\n"
    "A printed 0.34 stands for every number from 0.335 to 0.345.\n\n"
    "Hint: K = (accept length − 1) / accept rate. Compute its smallest and its largest value.",
    numbers_of_drafts,
    ((2.01, 0.34, 8), (2.05, 0.51, 8), (4.20, 0.40, 16), (1.10, 0.01, 16), (2.00, 1.00, 8), (3.02, 0.26, 16)),
    (
        Mistake(
            _as_exact,
            "That takes the printed figures as exact, and calls a correct report impossible. Each of them stands for "
            "an interval.",
        ),
        Mistake(
            _no_bonus,
            "The accept length counts the bonus token, the accept rate does not: subtract 1 before you divide.",
        ),
        Mistake(
            _nearest,
            "That gives the nearest whole number whether it fits or not. Then no report is ever impossible.",
        ),
        Mistake(
            _same_ends,
            "Both figures were taken at the same end. K is smallest where the accept length is smallest and the rate "
            "largest.",
        ),
        Mistake(
            _whole_unit,
            "The intervals are twice too wide. A figure with two decimals is rounded by at most 0.005, half of its "
            "last place.",
        ),
    ),
    "The smallest K comes from the smallest accept length and the largest rate, the largest K from the opposite ends.",
)


def most_tokens_per_s(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    """Compute the largest output throughput, in tokens per second, that the latencies allow.

    clients: each has at most one request in flight. ttft, tpot: means in ms. tokens: output tokens of every request.
    """
    # begin answer
    e2e = ttft + (tokens - 1) * tpot
    return clients * tokens / (e2e / 1000)
    # end answer


def _no_ttft(clients: int, _ttft: float, tpot: float, _tokens: int) -> float:
    return clients * 1000 / tpot


def _one_client(_clients: int, ttft: float, tpot: float, tokens: int) -> float:
    return 1000 * tokens / (ttft + (tokens - 1) * tpot)


def _all_by_tpot(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    return 1000 * clients * tokens / (ttft + tokens * tpot)


def _requests(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    return 1000 * clients / (ttft + (tokens - 1) * tpot)


def _per_ms(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    return clients * tokens / (ttft + (tokens - 1) * tpot)


def _first_not_counted(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    return 1000 * clients * (tokens - 1) / (ttft + (tokens - 1) * tpot)


MOST_TOKENS = Exercise(
    "14-2",
    "Write `most_tokens_per_s`: the largest output throughput that a report's latencies allow. There are `clients` "
    "clients. Each sends a request, waits until it is complete, and sends the next one. All requests put out equally "
    "many tokens. The latencies are in ms, the result is in tokens per second.\n\n"
    "Hint: how long does a request take? How many can a client complete in a second?",
    most_tokens_per_s,
    ((16, 26.53, 3.5028, 128), (1, 40.0, 8.0, 256), (8, 50.0, 10.0, 1), (64, 500.0, 12.0, 32)),
    (
        Mistake(
            _no_ttft,
            "That is the rate between the first and the last token. Until its first token a request gives nothing.",
        ),
        Mistake(_one_client, "That is the throughput of one client. All clients work at the same time."),
        Mistake(
            _all_by_tpot,
            "The first token comes after the TTFT, so only the tokens after it take a TPOT each: one less than all.",
        ),
        Mistake(_per_ms, "That is tokens per millisecond: the latencies are in ms."),
        Mistake(
            _first_not_counted,
            "The first token counts too. Only its time is another one, the TTFT.",
        ),
        Mistake(_requests, "That is requests per second. Each of them puts out `tokens` tokens."),
    ),
    "This is Little's law: requests in flight = requests per second · time of a request. A throughput above this bound "
    "contradicts the latencies.",
)


def most_by_hardware(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    """Compute the most tokens per second that the hardware allows, with 2 bytes for each parameter.

    nodes: tokens that the target reads in a round for each request, the root included. bandwidth: bytes per second.
    peak_flops: operations per second.
    """
    # begin answer
    reading = 2 * parameters / bandwidth
    arithmetic = 2 * parameters * requests * nodes / peak_flops
    return requests * accept_length / max(reading, arithmetic)
    # end answer


def _only_reading(
    accept_length: float, requests: int, _nodes: int, parameters: float, bandwidth: float, _peak_flops: float
) -> float:
    return requests * accept_length * bandwidth / (2 * parameters)


def _each_reads(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    return most_by_hardware(accept_length, 1, requests * nodes, parameters, bandwidth, peak_flops)


def _only_accepted(
    accept_length: float, requests: int, _nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    reading = 2 * parameters / bandwidth
    arithmetic = 2 * parameters * requests * accept_length / peak_flops
    return requests * accept_length / max(reading, arithmetic)


def _one_token(
    _accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    return most_by_hardware(1.0, requests, nodes, parameters, bandwidth, peak_flops)


def _both(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    seconds = 2 * parameters / bandwidth + 2 * parameters * requests * nodes / peak_flops
    return requests * accept_length / seconds


def _weights_for_each(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    return most_by_hardware(accept_length, requests, nodes, parameters, bandwidth / requests, peak_flops)


def _only_arithmetic(
    accept_length: float, _requests: int, nodes: int, parameters: float, _bandwidth: float, peak_flops: float
) -> float:
    return accept_length * peak_flops / (2 * parameters * nodes)


def _one_byte(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    return most_by_hardware(accept_length, requests, nodes, parameters, 2 * bandwidth, peak_flops)


def _one_operation(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    return most_by_hardware(accept_length, requests, nodes, parameters, bandwidth, 2 * peak_flops)


MOST_BY_HARDWARE = Exercise(
    "14-3",
    "Write `most_by_hardware`: a bound on the tokens per second of a whole server. In every round the GPU reads all "
    "weights once, for all requests together. It takes two operations for each parameter and each token that the "
    "target reads. Reading and arithmetic can happen at the same time. Nothing else takes time: no drafter, no KV, no "
    "host. A round gives `accept_length` tokens to each request.",
    most_by_hardware,
    (
        (1.8933, 1, 4, 7.5e9, 8.0e12, 2.25e15),
        (2.0, 64, 4, 7.5e9, 3.35e12, 9.894e14),
        (2.0, 256, 8, 7.5e9, 3.35e12, 9.894e14),
        (1.0, 1, 1, 70e9, 4.8e12, 9.894e14),
    ),
    (
        Mistake(
            _only_reading,
            "The arithmetic is missing. With many requests it takes longer than reading the weights.",
        ),
        Mistake(
            _each_reads,
            "That is the rate of one request. A round gives its tokens to every one of the requests.",
        ),
        Mistake(
            _weights_for_each,
            "The weights are read once for all requests, not once for each. That is why servers batch.",
        ),
        Mistake(
            _only_arithmetic,
            "The reading is missing. With few requests it takes longer than the arithmetic.",
        ),
        Mistake(_one_byte, "A parameter has 2 bytes, so the weights are twice as many bytes."),
        Mistake(_one_operation, "A parameter takes two operations for each token: a product and a sum."),
        Mistake(
            _only_accepted,
            "The target computes every node that it verifies, also those that are rejected afterwards.",
        ),
        Mistake(_one_token, "A round gives each request as many tokens as its accept length, not one."),
        Mistake(
            _both,
            "That adds both times. They can overlap completely, so a bound may only count the longer one.",
        ),
    ),
    "Everything that is left out makes a server slower, so no correct report can exceed this bound.",
)

EXERCISES = (NUMBERS_OF_DRAFTS, MOST_TOKENS, MOST_BY_HARDWARE)
