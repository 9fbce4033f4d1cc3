"""What cannot be true in a benchmark's report, and what follows from it that it does not say."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from specsim.simulator.measurement import LATENCIES
from specsim.simulator.report import Report

Verdict = Literal["holds", "cannot be true", "follows"]
EXACT = 1e-3  # relative: what rounding in print leaves of an identity
_ACCEPT_LENGTH, _ACCEPT_RATE = "Spec Decode Accept Length", "Spec Decode Accept Rate (%)"
_OUTPUT, _REQUESTS, _TOTAL = (
    "Output Throughput (tok/s)",
    "Request Throughput (req/s)",
    "Total Token Throughput (tok/s)",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What an identity says of one report."""

    report: str
    identity: str
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True)
class Stated:
    """What the command or the text beside a report states: tokens a request puts out, drafts a round."""

    output_tokens: int | None = None
    num_drafts: int | None = None


def lint(report: Report, stated: Stated = Stated()) -> list[Finding]:
    """Every identity that the report has the figures for. A mean TPOT or ITL of 0 is none: clients write it where they
    measured nothing.
    """
    return [
        Finding(report.label, identity, verdict, says)
        for identity, check in IDENTITIES.items()
        for verdict, says in check(report, stated)
    ]


def output_tokens(report: Report) -> float | None:
    """Tokens a request puts out, by its throughputs."""
    output, requests = (report.figures.get(name) for name in (_OUTPUT, _REQUESTS))
    return output / requests if output is not None and requests else None


def prompt_tokens(report: Report) -> float | None:
    """Tokens of a prompt, by the throughputs."""
    total, output, requests = (report.figures.get(name) for name in (_TOTAL, _OUTPUT, _REQUESTS))
    return (total - output) / requests if None not in (total, output) and requests else None


def decoded_tokens(report: Report) -> float | None:
    """Tokens a request puts out, by its latencies: E2E = TTFT + (L - 1) · TPOT."""
    ttft, tpot, e2e = (report.figures.get(f"Mean {what} (ms)") for what in ("TTFT", "TPOT", "E2E Latency"))
    return 1 + (e2e - ttft) / tpot if None not in (ttft, e2e) and tpot else None


def num_drafts(report: Report) -> float | None:
    """Drafts of a round: (accept length - 1) / accept rate."""
    length, rate = (report.figures.get(name) for name in (_ACCEPT_LENGTH, _ACCEPT_RATE))
    return 100 * (length - 1) / rate if length is not None and rate else None


def in_flight(report: Report) -> float | None:
    """Requests under way on average: Little's law."""
    requests, e2e = report.figures.get(_REQUESTS), report.figures.get("Mean E2E Latency (ms)")
    return requests * e2e / 1e3 if None not in (requests, e2e) else None


Said = Iterator[tuple[Verdict, str]]


def _acceptance(report: Report, stated: Stated) -> Said:
    length, rate = report.figures.get(_ACCEPT_LENGTH), report.figures.get(_ACCEPT_RATE)
    if length is not None and length < 1:
        yield "cannot be true", f"accept length {length:g}: a round gives at least its bonus token"
    if rate is not None and rate > 100:
        yield "cannot be true", f"accept rate {rate:g} %: more accepted than proposed"
    if length is None or rate is None or length < 1:
        return
    drafts = num_drafts(report)
    if drafts is None:
        yield _identity("accept length", length, "1 + K · 0 =", 1)
    elif _is_whole(drafts) and (whole := round(drafts)) >= 1:
        yield "holds", f"{length:g} = 1 + {whole} · {rate / 100:.4f}"
        if stated.num_drafts not in (None, whole):
            yield "cannot be true", f"{stated.num_drafts} drafts a round as stated: the figures are those of {whole}"
    else:
        drafts_only = 100 * length / rate
        hint = f"; {round(drafts_only)} drafts do without the bonus token" if _is_whole(drafts_only) else ""
        yield "cannot be true", f"accept length {length:g} at {rate:g} %: no number of drafts gives both{hint}"


def _positions(report: Report, stated: Stated) -> Said:
    rates, length = report.rates_by_position, report.figures.get(_ACCEPT_LENGTH)
    if not rates:
        return
    if any(later > earlier + EXACT for earlier, later in pairwise(rates)):
        yield "cannot be true", f"unconditional rates {', '.join(f'{rate:g}' for rate in rates)}: they increase"
    if length is not None:
        yield _identity("accept length", length, "1 + the sum of the rates by position", 1 + math.fsum(rates))


def _latency(report: Report, stated: Stated) -> Said:
    """Exact if all requests put out as many tokens; the mean of products otherwise."""
    by_rate, by_time = output_tokens(report), decoded_tokens(report)
    if by_time is not None and by_time < 1:
        yield "cannot be true", "E2E latency below TTFT"
    elif None not in (by_rate, by_time) and _equal(by_rate, by_time, EXACT):
        yield "holds", f"every request put out {by_rate:.0f} tokens: {by_rate:.2f} by throughput, {by_time:.2f} by time"
    elif None not in (by_rate, by_time):
        yield "follows", f"outputs differ in length: {by_rate:.1f} tokens on average, {by_time:.1f} by mean times"
    if stated.output_tokens and by_rate is not None and not _equal(by_rate, stated.output_tokens, EXACT):
        yield "cannot be true", f"{stated.output_tokens} output tokens as stated: a request put out {by_rate:.1f}"


def _little(report: Report, stated: Stated) -> Said:
    under_way, most = in_flight(report), report.concurrency
    if under_way is None:
        return
    if most is None:
        yield "follows", f"{under_way:.1f} requests under way on average"
    elif under_way > most * (1 + 5 * EXACT):
        yield "cannot be true", f"{under_way:.2f} requests under way on average, at a concurrency of {most}"
    else:
        yield "holds", f"{under_way:.2f} of {most} requests under way on average"


def _totals(report: Report, stated: Stated) -> Said:
    seconds = report.duration
    tokens = (report.input_tokens, report.output_tokens)
    totals = {_REQUESTS: report.completed, _OUTPUT: tokens[1], _TOTAL: None if None in tokens else sum(tokens)}
    for name, total in totals.items():
        rate = report.figures.get(name)
        if seconds and total is not None and rate is not None:
            yield _identity(f"{name} · duration", rate * seconds, "the total", total)
    total, output = report.figures.get(_TOTAL), report.figures.get(_OUTPUT)
    if total is not None and output is not None and total < output * (1 - EXACT):
        yield "cannot be true", f"total throughput {total:g} below output throughput {output:g}"


def _order(report: Report, stated: Stated) -> Said:
    for what in LATENCIES:
        median, most = (report.figures.get(f"{how} {what} (ms)") for how in ("Median", "P99"))
        if median is not None and most is not None and median > most:
            yield "cannot be true", f"median {what} {median:g} ms above its P99, {most:g} ms"


def _delivery(report: Report, stated: Stated) -> Said:
    """Gaps between deliveries against time a token: how many tokens come together."""
    tpot, itl = (report.figures.get(f"Mean {what} (ms)") for what in ("TPOT", "ITL"))
    by_rate, by_time = output_tokens(report), decoded_tokens(report)
    if not tpot or not itl:
        return
    fixed = by_rate is not None and by_time is not None and _equal(by_rate, by_time, EXACT)
    if fixed and itl < tpot * (1 - EXACT):
        yield "cannot be true", f"ITL {itl:g} ms below TPOT {tpot:g} ms: deliveries hold at least one token each"
    else:
        yield "follows", f"{itl / tpot:.2f} tokens come together"


def _round(report: Report, stated: Stated) -> Said:
    length, tpot = report.figures.get(_ACCEPT_LENGTH), report.figures.get("Mean TPOT (ms)")
    if length and tpot:
        yield "follows", f"a round of a request takes {length * tpot:.2f} ms"


IDENTITIES: dict[str, Callable[[Report, Stated], Said]] = {
    "accept length = 1 + K · accept rate": _acceptance,
    "accept length = 1 + Σ rates by position": _positions,
    "E2E = TTFT + (L - 1) · TPOT": _latency,
    "requests/s · E2E ≤ concurrency": _little,
    "throughput · duration = total": _totals,
    "median ≤ P99": _order,
    "ITL / TPOT = tokens a delivery": _delivery,
    "round = accept length · TPOT": _round,
}


def _identity(left: str, value: float, right: str, other: float) -> tuple[Verdict, str]:
    is_equal = _equal(value, other, EXACT)
    return ("holds" if is_equal else "cannot be true"), f"{left} {value:g}, {right} {other:g}"


def _is_whole(drafts: float) -> bool:
    return math.isfinite(drafts) and _equal(drafts, round(drafts), 3 * EXACT)


def _equal(value: float, other: float, within: float) -> bool:
    return abs(value - other) <= within * max(abs(value), abs(other))
