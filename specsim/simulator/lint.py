"""Identities of a benchmark's report: figures that cannot be true, and others that follow from it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from specsim.simulator.measurement import LATENCIES, Report

Verdict = Literal["holds", "cannot be true", "follows"]
EXACT = 1e-3  # relative: what rounding in print leaves of an identity
_ACCEPT_LENGTH = "Spec Decode Accept Length"
_ACCEPT_RATE = "Spec Decode Accept Rate (%)"
_OUTPUT = "Output Throughput (tok/s)"
_REQUESTS = "Request Throughput (req/s)"
_TOTAL = "Total Token Throughput (tok/s)"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of an identity on one report."""

    report: str  # its label
    identity: str
    verdict: Verdict
    says: str  # the reason, with figures


@dataclass(frozen=True, slots=True)
class Stated:
    """Settings stated by the command or the text of a report."""

    output_tokens: int | None = None  # per request
    num_drafts: int | None = None  # per round


def lint(report: Report, stated: Stated = Stated()) -> list[Finding]:
    """Check every identity that the report has the figures for.

    A mean TPOT or ITL of 0 counts as missing: clients write it where they measured nothing.
    """
    return [
        Finding(report.label, identity, verdict, says)
        for identity, check in IDENTITIES.items()
        for verdict, says in check(report, stated)
    ]


def output_tokens(report: Report) -> float | None:
    """Tokens that a request puts out, by the throughputs."""
    output, requests = _figures(report, _OUTPUT, _REQUESTS)
    return output / requests if output is not None and requests else None


def prompt_tokens(report: Report) -> float | None:
    """Tokens of a prompt, by the throughputs."""
    total, output, requests = _figures(report, _TOTAL, _OUTPUT, _REQUESTS)
    return (total - output) / requests if total is not None and output is not None and requests else None


def decoded_tokens(report: Report) -> float | None:
    """Tokens that a request puts out, by the latencies: E2E = TTFT + (L - 1) · TPOT."""
    ttft, tpot, e2e = _figures(report, "Mean TTFT (ms)", "Mean TPOT (ms)", "Mean E2E Latency (ms)")
    return 1 + (e2e - ttft) / tpot if ttft is not None and e2e is not None and tpot else None


def num_drafts(report: Report) -> float | None:
    """Drafts of a round: (accept length - 1) / accept rate."""
    length, rate = _figures(report, _ACCEPT_LENGTH, _ACCEPT_RATE)
    return 100 * (length - 1) / rate if length is not None and rate else None


def in_flight(report: Report) -> float | None:
    """Requests under way on average: Little's law."""
    requests, e2e = _figures(report, _REQUESTS, "Mean E2E Latency (ms)")
    return requests * e2e / 1e3 if requests is not None and e2e is not None else None


Verdicts = Iterator[tuple[Verdict, str]]  # each with its reason


def _acceptance(report: Report, stated: Stated) -> Verdicts:
    length, rate = _figures(report, _ACCEPT_LENGTH, _ACCEPT_RATE)
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


def _positions(report: Report, _: Stated) -> Verdicts:
    rates = report.rates_by_position
    length = report.figures.get(_ACCEPT_LENGTH)
    if not rates:
        return
    if any(later > earlier + EXACT for earlier, later in pairwise(rates)):
        yield "cannot be true", f"unconditional rates {', '.join(f'{rate:g}' for rate in rates)}: they increase"
    if length is not None:
        yield _identity("accept length", length, "1 + the sum of the rates by position", 1 + math.fsum(rates))


def _latency(report: Report, stated: Stated) -> Verdicts:
    """Compare tokens by rate and by time: exact if all requests put out as many, else the mean of products."""
    by_rate = output_tokens(report)
    by_time = decoded_tokens(report)
    if by_time is not None and by_time < 1:
        yield "cannot be true", "E2E latency below TTFT"
    elif by_rate is not None and by_time is not None and _equal(by_rate, by_time, EXACT):
        yield "holds", f"every request put out {by_rate:.0f} tokens: {by_rate:.2f} by throughput, {by_time:.2f} by time"
    elif by_rate is not None and by_time is not None:
        yield "follows", f"outputs differ in length: {by_rate:.1f} tokens on average, {by_time:.1f} by mean times"
    if stated.output_tokens and by_rate is not None and not _equal(by_rate, stated.output_tokens, EXACT):
        yield "cannot be true", f"{stated.output_tokens} output tokens as stated: a request put out {by_rate:.1f}"


def _little(report: Report, _: Stated) -> Verdicts:
    under_way = in_flight(report)
    most = report.concurrency
    if under_way is None:
        return
    if most is None:
        yield "follows", f"{under_way:.1f} requests under way on average"
    elif under_way > most * (1 + 5 * EXACT):
        yield "cannot be true", f"{under_way:.2f} requests under way on average, at a concurrency of {most}"
    else:
        yield "holds", f"{under_way:.2f} of {most} requests under way on average"


def _totals(report: Report, _: Stated) -> Verdicts:
    seconds = report.duration
    totals = {_REQUESTS: report.completed, _OUTPUT: report.output_tokens}
    if report.input_tokens is not None and report.output_tokens is not None:
        totals[_TOTAL] = report.input_tokens + report.output_tokens
    for name, total in totals.items():
        rate = report.figures.get(name)
        if seconds and total is not None and rate is not None:
            yield _identity(f"{name} · duration", rate * seconds, "the total", total)
    total, output = _figures(report, _TOTAL, _OUTPUT)
    if total is not None and output is not None and total < output * (1 - EXACT):
        yield "cannot be true", f"total throughput {total:g} below output throughput {output:g}"


def _order(report: Report, _: Stated) -> Verdicts:
    for what in LATENCIES:
        median, most = _figures(report, f"Median {what} (ms)", f"P99 {what} (ms)")
        if median is not None and most is not None and median > most:
            yield "cannot be true", f"median {what} {median:g} ms above its P99, {most:g} ms"


def _delivery(report: Report, _: Stated) -> Verdicts:
    """Compare gaps between deliveries with times per token: how many tokens come together."""
    tpot, itl = _figures(report, "Mean TPOT (ms)", "Mean ITL (ms)")
    by_rate = output_tokens(report)
    by_time = decoded_tokens(report)
    if not tpot or not itl:
        return
    fixed = by_rate is not None and by_time is not None and _equal(by_rate, by_time, EXACT)
    if fixed and itl < tpot * (1 - EXACT):
        yield "cannot be true", f"ITL {itl:g} ms below TPOT {tpot:g} ms: deliveries hold at least one token each"
    else:
        yield "follows", f"{itl / tpot:.2f} tokens come together"


def _round(report: Report, _: Stated) -> Verdicts:
    length, tpot = _figures(report, _ACCEPT_LENGTH, "Mean TPOT (ms)")
    if length and tpot:
        yield "follows", f"a round of a request takes {length * tpot:.2f} ms"


IDENTITIES: dict[str, Callable[[Report, Stated], Verdicts]] = {
    "accept length = 1 + K · accept rate": _acceptance,
    "accept length = 1 + Σ rates by position": _positions,
    "E2E = TTFT + (L - 1) · TPOT": _latency,
    "requests/s · E2E ≤ concurrency": _little,
    "throughput · duration = total": _totals,
    "median ≤ P99": _order,
    "ITL / TPOT = tokens a delivery": _delivery,
    "round = accept length · TPOT": _round,
}


def _figures(report: Report, *names: str) -> list[float | None]:
    return [report.figures.get(name) for name in names]


def _identity(left: str, value: float, right: str, other: float) -> tuple[Verdict, str]:
    is_equal = _equal(value, other, EXACT)
    return ("holds" if is_equal else "cannot be true"), f"{left} {value:g}, {right} {other:g}"


def _is_whole(drafts: float) -> bool:
    return math.isfinite(drafts) and _equal(drafts, round(drafts), 3 * EXACT)


def _equal(value: float, other: float, within: float) -> bool:
    return abs(value - other) <= within * max(abs(value), abs(other))
