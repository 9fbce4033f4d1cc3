"""Reader of the log of llama.cpp's server, which prints a line about the drafts of every request.

tools/server/server-context.cpp; its lines of statistics add up the same drafts, and are not read.
"""

import re
from collections.abc import Iterator

from specsim.acceptance.content import Content
from specsim.acceptance.vllm_metrics import LENGTH_ROUNDING, LogInterval, read_rates
from specsim.core.limits import parse_number
from specsim.simulator.acceptance_record import AcceptanceRecord
from specsim.simulator.measurement import Rounded

FORMAT = "the log of llama.cpp's server (draft acceptance = ...)"
CONVENTION = (
    "accepted and generated count drafts only, rates by position are shares of the rounds with drafts, and the mean "
    "acceptance length includes the bonus token."
)
_REQUEST = re.compile(
    r"draft acceptance = *(?P<rate>[\d.]+) \( *(?P<accepted>\d+) accepted / *(?P<drafted>\d+) generated\), "
    r"mean acceptance length = *(?P<length>[\d.]+), acceptance rate per position = \((?P<rates>[\d., ]+)\)"
)
_NAMES = {
    "accepted": "accepted",
    "proposed": "generated",
    "accept_length": "mean acceptance length",
    "accept_rate": "draft acceptance",
}
_RATE_UNIT = 0.000005  # half of the last printed place


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the record of a log; [] for another file."""
    requests = [(interval, interval.counts(content.source)) for interval in _requests(content)]
    used = [(interval, counts) for interval, counts in requests if counts is not None and counts.rounds]
    if not used:
        return []
    rounds = sum(counts.rounds for _, counts in used)
    record = AcceptanceRecord.of_counts(
        [counts for _, counts in used],
        content.source,
        "llama.cpp",
        CONVENTION,
        topk=1,
        is_by_request=True,
        reported_length=sum(interval.length * counts.rounds for interval, counts in used) / rounds,
        reported_rounding=LENGTH_ROUNDING,
        proposed_drafts=sum(interval.drafted for interval, _ in used),
        stated=tuple(interval.figures(_NAMES) for interval, _ in used),
    )
    return [record]


def _requests(content: Content) -> Iterator[LogInterval]:
    for number, line in enumerate(content.text.split("\n"), start=1):
        if match := _REQUEST.search(line):
            accepted, drafted = (content.integer(name, parse_number(match[name])) for name in ("accepted", "drafted"))
            length = content.number(_NAMES["accept_length"], parse_number(match["length"]))
            rate = Rounded.of(content.number(_NAMES["accept_rate"], parse_number(match["rate"])), _RATE_UNIT)
            rates = read_rates(content, match["rates"])
            yield LogInterval(length, accepted, drafted, rates, rate, number, is_full=False)
