"""Reader of vLLM's metrics: of requests (responses), of the server (Prometheus counters), and of its log.

https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/ and vllm/v1/spec_decode/metrics.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from specsim.acceptance.content import Content
from specsim.acceptance.draft_histogram import reported, request_counts
from specsim.core.errors import require
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

FORMAT = (
    "vLLM's responses with --per-request-spec-decode-metrics, its /metrics page (vllm:spec_decode_...) and its log "
    "(SpecDecoding metrics)"
)
CONVENTION = (
    "num_drafts counts rounds of a request, accepted tokens count drafts only, rates by position are unconditional; "
    "mean acceptance length includes the bonus token."
)
_SAMPLE = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>[\d.]+),.*?Accepted: (?P<accepted>\d+) tokens, "
    r"Drafted: (?P<drafted>\d+) tokens, Per-position acceptance rate: (?P<rates>[\d., ]+?), Avg Draft acceptance rate"
)
LENGTH_ROUNDING = 0.01  # half of the last printed place, and as much for the rounds that follow from rounded rates
_DRAFTS = "num_drafts"
_ACCEPTED = "num_accepted_tokens"
_BY_POSITION = "num_accepted_tokens_per_pos"


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the records of a file; [] for another file."""
    return [*_responses(content), *_samples(content), *_log(content)]


def _responses(content: Content) -> Iterator[AcceptanceRecord]:
    requests = list(content.objects("acceptance_histogram", "num_spec_steps"))
    if requests:
        counts = [request_counts(content, each) for each in requests]
        stated = reported(content, requests, counts)
        yield AcceptanceRecord.of_counts(
            counts, content.source, "vllm", CONVENTION, topk=1, is_by_request=True, **stated
        )


def _samples(content: Content) -> Iterator[AcceptanceRecord]:
    """Read the counters of each model, added over its engines."""
    totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    positions: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, labels, text in _SAMPLE.findall(content.text):
        if name.endswith("_created"):
            continue
        named: Mapping[str, str] = dict(_LABEL.findall(labels))
        model = named.get("model_name", "")
        value = content.whole(f"vllm:spec_decode_{name}", float(text))
        if name == _BY_POSITION:
            positions[model][int(named.get("position", "0"))] += value
        else:
            totals[model][name] += value
    for model, found in totals.items():
        if _DRAFTS not in found:
            continue
        rows = tuple(count for _, count in sorted(positions[model].items()))
        counts = Counts(found[_DRAFTS], sum(rows) if rows else found[_ACCEPTED], rows)
        proposed = found.get("num_draft_tokens")
        yield AcceptanceRecord.of_counts(
            [counts], content.source, "vllm", CONVENTION, topk=1, pair=model, proposed_drafts=proposed
        )


def _log(content: Content) -> Iterator[AcceptanceRecord]:
    """Add the intervals of a log. Rounds follow from the accepted drafts and the rates, which are rounded."""
    found = [(match, _interval(content, match)) for match in _LINE.finditer(content.text)]
    used = [(match, counts) for match, counts in found if counts is not None]
    if not found:
        return
    require(used, "acceptance", content.source, "a log with at least one round of drafts (it has none)")
    total = Counts.pooled([counts for _, counts in used])
    weighted = sum(content.number("length", float(match["length"])) * counts.rounds for match, counts in used)
    yield AcceptanceRecord.of_counts(
        [total],
        content.source,
        "vllm",
        CONVENTION,
        topk=1,
        reported_length=weighted / total.rounds,
        reported_rounding=LENGTH_ROUNDING,
        proposed_drafts=sum(int(match["drafted"]) for match, _ in used),
    )


def _interval(content: Content, match: re.Match[str]) -> Counts | None:
    """Count the rounds of one line of the log; None where nothing was drafted."""
    rates = [content.number("rate", float(text)) for text in match["rates"].split(",")]
    accepted = int(match["accepted"])
    drafted = int(match["drafted"])
    if not drafted:
        return None
    rounds = drafted / len(rates)  # if every round drafts for all positions
    share = sum(rates)
    if accepted and abs(accepted / share - rounds) > 0.01 * rounds:
        rounds = accepted / share
    return _nearest(rates, accepted, round(rounds))


def _nearest(rates: list[float], accepted: int, rounds: int) -> Counts:
    """Round the counts of each position so that they add up to the accepted drafts and never rise."""
    counts = [min(round(rate * rounds), rounds) for rate in rates]
    counts[0] = min(max(counts[0] + accepted - sum(counts), *counts[1:], 0), rounds)
    return Counts(rounds, sum(counts), tuple(counts))
