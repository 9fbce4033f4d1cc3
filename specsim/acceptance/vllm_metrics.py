"""Reader of vLLM's metrics: of requests (responses), of the server (Prometheus counters), and of its log.

https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/ and vllm/v1/spec_decode/metrics.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specsim.acceptance.content import Content, reported, request_counts
from specsim.core.errors import require
from specsim.core.limits import MOST_STEPS, half_unit, parse_number, read_number
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts
from specsim.simulator.measurement import Rounded
from specsim.simulator.tool_figures import ToolFigures

FORMAT = (
    "vLLM's responses with --per-request-spec-decode-metrics, those of TensorRT-LLM, vLLM's /metrics page "
    "(vllm:spec_decode_...) and its log (SpecDecoding metrics)"
)
CONVENTION = (
    "num_drafts counts rounds of a request, accepted tokens count drafts only, rates by position are unconditional; "
    "mean acceptance length includes the bonus token."
)
_SAMPLE = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})?[ \t]+([0-9.eE+-]+)", re.MULTILINE)
_LABEL = re.compile(r'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')  # possessive, or a long name takes quadratic time
_MEAN = re.compile(r"SpecDecoding metrics: Mean acceptance length: (?P<length>[\d.]+),")
_TOTALS = re.compile(
    r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
    r"Per-position acceptance rate: (?P<rates>[\d., ]+), Avg Draft acceptance rate(?:: (?P<average>[\d.]+)%)?"
)
LENGTH_ROUNDING = 0.01  # half of the last printed place, and as much for the rounds that follow from rounded rates
_DRAFTS = "num_drafts"
_ACCEPTED = "num_accepted_tokens"
_COUNTERS = {"rounds": _DRAFTS, "accepted": _ACCEPTED, "proposed": "num_draft_tokens"}
_BY_POSITION = "num_accepted_tokens_per_pos"
_LOG_NAMES = {
    "accepted": "Accepted",
    "proposed": "Drafted",
    "accept_length": "Mean acceptance length",
    "accept_rate": "Avg Draft acceptance rate",
}
_RATES = "Per-position acceptance rate"


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the records of a file; [] for another file."""
    return [*_responses(content), *_samples(content), *_log(content)]


def _responses(content: Content) -> Iterator[AcceptanceRecord]:
    requests = list(content.objects("acceptance_histogram", "num_spec_steps"))
    if requests:
        counts = [request_counts(content, request) for request in requests]
        stated = reported(content, requests, counts)
        tool = "tensorrt-llm" if any("total_draft_tokens" in request for request in requests) else "vllm"
        yield AcceptanceRecord.of_counts(counts, content.source, tool, CONVENTION, topk=1, is_by_request=True, **stated)


def _samples(content: Content) -> Iterator[AcceptanceRecord]:
    """Read the counters of each model, added over its engines."""
    totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    positions: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    half_units: dict[str, float] = defaultdict(float)
    for name, labels, text in _SAMPLE.findall(content.text):
        if name.endswith("_created"):
            continue
        named: Mapping[str, str] = dict(_LABEL.findall(labels))
        model = named.get("model_name", "")
        value = content.integer(f"vllm:spec_decode_{name}", parse_number(text))
        half_units[model] += half_unit(text)
        if name == _BY_POSITION:
            position = content.integer("position", parse_number(named.get("position", "0")), MOST_STEPS)
            positions[model][position] += value
        else:
            totals[model][name] += value
    for model, counters in totals.items():
        if _DRAFTS not in counters:
            continue
        rows = tuple(count for _, count in sorted(positions[model].items()))
        allowed = f"a page with its {_ACCEPTED} too (in {content.source})"
        require(rows or _ACCEPTED in counters, _DRAFTS, counters[_DRAFTS], allowed)
        counts = Counts(counters[_DRAFTS], sum(rows) if rows else counters[_ACCEPTED], rows)
        stated = _counter_figures(model, counters, rows, half_units[model])
        yield AcceptanceRecord.of_counts(
            [counts],
            content.source,
            "vllm",
            CONVENTION,
            topk=1,
            pair=model,
            proposed_drafts=counters.get("num_draft_tokens"),
            stated=(stated,),
        )


def _counter_figures(model: str, counters: Mapping[str, int], rows: Sequence[int], unit: float) -> ToolFigures:
    """Collect what the counters of a model state; unit: error of all of them together, as they are printed."""
    figures: dict[str, Any] = {
        name: Rounded.of(counters[key], unit) for name, key in _COUNTERS.items() if key in counters
    }
    is_exact = bool(rows) and not unit
    histogram = tuple(before - after for before, after in pairwise((counters[_DRAFTS], *rows, 0))) if is_exact else ()
    rounds = figures.get("rounds")
    rates = tuple(Rounded.of(count, unit) / rounds for count in rows) if rounds is not None and rounds.value else ()
    return ToolFigures(model or "the counters", _COUNTERS, histogram=histogram, rates=rates, **figures)


def _log(content: Content) -> Iterator[AcceptanceRecord]:
    """Add the intervals of a log. Rounds follow from the accepted drafts and the rates, which are rounded."""
    intervals = list(_intervals(content))
    used = [(interval, counts) for interval in intervals if (counts := interval.counts(content.source)) is not None]
    if not intervals:
        return
    require(used, "acceptance", content.source, "a log with at least one round of drafts (it has none)")
    total = Counts.pooled([counts for _, counts in used])
    weighted = sum(interval.length * counts.rounds for interval, counts in used)
    yield AcceptanceRecord.of_counts(
        [total],
        content.source,
        "vllm",
        CONVENTION,
        topk=1,
        reported_length=weighted / total.rounds,
        reported_rounding=LENGTH_ROUNDING,
        proposed_drafts=sum(interval.drafted for interval, _ in used),
        stated=tuple(interval.figures(_LOG_NAMES) for interval, _ in used),
    )


@dataclass(frozen=True, slots=True)
class LogInterval:
    """Figures of one line of the log."""

    length: float
    accepted: int
    drafted: int
    rates: list[float]
    average: Rounded | None  # share of the drafts that were accepted
    number: int  # of the line, from 1
    is_full: bool = True  # whether rounds draft for all positions, as far as the rates allow

    def figures(self, names: Mapping[str, str]) -> ToolFigures:
        """Collect what the line states, with the places that it prints; names: the tool's, by field."""
        return ToolFigures(
            f"line {self.number}",
            names,
            accepted=Rounded.of(self.accepted),
            proposed=Rounded.of(self.drafted),
            accept_length=Rounded.of(self.length, LENGTH_ROUNDING),
            accept_rate=self.average,
            rates=tuple(Rounded.of(rate, 0.0005) for rate in self.rates),
        )

    def counts(self, source: str) -> Counts | None:
        """Count the rounds; None where nothing was drafted."""
        if not self.drafted:
            return None
        rounds = self.drafted / len(self.rates)
        share = sum(self.rates)
        allowed = f"0 where all acceptance rates are 0 (in {source})"
        require(share or not self.accepted, "Accepted", self.accepted, allowed)
        if self.accepted and (not self.is_full or abs(self.accepted / share - rounds) > 0.01 * rounds):
            rounds = self.accepted / share
        return _nearest(self.rates, self.accepted, round(rounds))


def _intervals(content: Content) -> Iterator[LogInterval]:
    """Yield the figures of every line of an interval."""
    for number, line in enumerate(content.text.split("\n"), start=1):
        mean = _MEAN.search(line)
        if mean and (totals := _TOTALS.search(line, mean.end())):
            rates = read_rates(content, totals["rates"])
            accepted, drafted = (content.integer(name, parse_number(totals[name])) for name in ("accepted", "drafted"))
            length = content.number("length", parse_number(mean["length"]))
            text = totals["average"]
            percent = None if text is None else content.number(_LOG_NAMES["accept_rate"], parse_number(text))
            average = None if percent is None else Rounded.of(percent / 100, 0.0005)
            yield LogInterval(length, accepted, drafted, rates, average, number)


def read_rates(content: Content, text: str) -> list[float]:
    """Read rates by position, with commas between them."""
    texts = text.split(",")
    require(len(texts) <= MOST_STEPS, _RATES, f"{len(texts)} positions", f"at most {MOST_STEPS}")
    return [read_number(parse_number(rate.strip()), _RATES, content.source, 0, 1) for rate in texts]


def _nearest(rates: list[float], accepted: int, rounds: int) -> Counts:
    """Round the counts of each position so that they add up to the accepted drafts and never rise."""
    counts = [min(round(rate * rounds), rounds) for rate in rates]
    counts[0] = min(max(counts[0] + accepted - sum(counts), *counts[1:], 0), rounds)
    return Counts(rounds, sum(counts), tuple(counts))
