"""Identities of a benchmark's report: figures that cannot be true, and others that follow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specsim.simulator.acceptance_record import AcceptanceRecord
from specsim.simulator.measurement import Report, Rounded
from specsim.simulator.results import LATENCIES, SPECULATION
from specsim.simulator.tool_figures import EXACT, ToolFigures, Verdict, verdicts

Verdicts = Iterator[tuple[Verdict, str]]  # each with its reason, with figures


@dataclass(frozen=True, slots=True)
class Stated:
    """Settings stated by the command or the text of a report."""

    output_tokens: int | None = None  # per request
    num_drafts: int | None = None  # per round


NOTHING_STATED = Stated()


def identity(name: str, value: Rounded, other_name: str, other: Rounded) -> tuple[Verdict, str]:
    """Compare two figures that have to be equal."""
    is_equal = value.equals(other, EXACT)
    return ("holds" if is_equal else "cannot be true"), f"{name} {value.value:g}, {other_name} {other.value:g}"


ONE = Rounded.of(1)
PERCENT = Rounded.of(100)
_LENGTH = "Spec Decode Accept Length"
_RATE = "Spec Decode Accept Rate (%)"


def num_drafts(report: Report) -> Rounded | None:
    """Derive the drafts of a round: (accept length - 1) / accept rate."""
    length = report.figure(_LENGTH)
    rate = report.figure(_RATE)
    return PERCENT * (length - ONE) / rate if length is not None and rate is not None and rate.value else None


def check_rate(report: Report, stated: Stated) -> Verdicts:
    """Compare accept length and rate: some number of drafts a round has to give both.

    The report may count the drafts itself.
    """
    length = report.figure(_LENGTH)
    rate = report.figure(_RATE)
    if length is not None and length.high < 1:
        yield "cannot be true", f"accept length {length.value:g}: a round gives at least its bonus token"
    if rate is not None and rate.low > 100:
        yield "cannot be true", f"accept rate {rate.value:g} %: more accepted than proposed"
    if length is None or rate is None or length.high < 1 or report.num_drafts is not None:
        return
    drafts = num_drafts(report)
    if drafts is None:
        yield identity("accept length", length, "1 + K · 0 =", ONE)
        return
    counts = drafts.integers(3 * EXACT)
    if counts.stop <= max(counts.start, 1):
        bonus = (PERCENT * length / rate).integers(3 * EXACT)
        hint = f"; {bonus[0]} drafts do without the bonus token" if bonus else ""
        both = f"accept length {length.value:g} at {rate.value:g} %"
        yield "cannot be true", f"{both}: no number of drafts gives both{hint}"
        return
    nearest = min(max(round(drafts.value), counts.start, 1), counts.stop - 1)
    yield "holds", f"{length.value:g} = 1 + {nearest} · {rate.value / 100:.4f}"
    if stated.num_drafts is not None and stated.num_drafts not in counts:
        yield "cannot be true", f"{stated.num_drafts} drafts a round as stated: the figures are those of {nearest}"


def check_length(report: Report, stated: Stated) -> Verdicts:
    """Compare the accept length with the most that the stated drafts give, or the positions that are reported."""
    length = report.figure(_LENGTH)
    drafts = stated.num_drafts or len(report.rates_by_position)
    if length is None or not drafts:
        return
    if length.low > (1 + drafts) * (1 + EXACT):
        yield "cannot be true", f"accept length {length.value:g} with {drafts} drafts a round: at most {drafts + 1}"
    else:
        yield "holds", f"{length.value:g} is at most {drafts} + 1"


def check_counts(report: Report, stated: Stated) -> Verdicts:
    """Compare rounds, proposed and accepted drafts with each other, and with the figures made of them."""
    rounds = report.num_rounds
    drafts = report.num_drafts
    accepted = report.num_accepted_drafts
    length = report.figure(_LENGTH)
    rate = report.figure(_RATE)
    if drafts is not None and accepted is not None and accepted > drafts:
        yield "cannot be true", f"{accepted:,} drafts accepted of {drafts:,} proposed"
    if drafts and accepted is not None and rate is not None:
        yield identity("accept rate", rate, "100 · accepted / proposed drafts", Rounded.of(100 * accepted / drafts))
    if rounds and accepted is not None and length is not None:
        yield identity("accept length", length, "1 + accepted drafts / rounds", Rounded.of(1 + accepted / rounds))
    if rounds is None or drafts is None:
        return
    if drafts < rounds:
        yield "cannot be true", f"{drafts:,} drafts in {rounds:,} rounds that drafted"
    elif stated.num_drafts is not None and drafts > stated.num_drafts * rounds:
        most = f"{stated.num_drafts} drafts a round as stated"
        yield "cannot be true", f"{most}: {drafts:,} were proposed in {rounds:,} rounds"
    elif rounds:
        yield "follows", f"{drafts / rounds:.2f} drafts a round on average"


def check_positions(report: Report, _: Stated) -> Verdicts:
    """Compare the rates by position with each other and with the accept length."""
    rates = [Rounded.of(rate, report.rounding / 100) for rate in report.rates_by_position]
    length = report.figure(_LENGTH)
    if not rates:
        return
    if any(later.low > earlier.high + EXACT for earlier, later in pairwise(rates)):
        listed = ", ".join(f"{rate.value:g}" for rate in rates)
        yield "cannot be true", f"unconditional rates {listed}: they increase"
    if length is not None:
        yield identity("accept length", length, "1 + the sum of the rates by position", sum(rates, ONE))


def check_round(report: Report, _: Stated) -> Verdicts:
    """Derive the time of a round."""
    length = report.figure(_LENGTH)
    tpot = report.figure("Mean TPOT (ms)")
    if length is not None and tpot is not None and length.value and tpot.value:
        yield "follows", f"a round of a request takes {length.value * tpot.value:.2f} ms"


_OUTPUT = "Output Throughput (tok/s)"
_REQUESTS = "Request Throughput (req/s)"
_TOTAL = "Total Token Throughput (tok/s)"
_E2E = "Mean E2E Latency (ms)"
_TPOT = "Mean TPOT (ms)"
_SECOND = Rounded.of(1e3)  # ms
LOOSE = 5 * EXACT  # of products of several means


def output_tokens(report: Report) -> Rounded | None:
    """Derive a request's output tokens from the throughputs, or from totals where these have few digits."""
    if report.rounding and report.completed and report.output_tokens is not None:
        return Rounded.of(report.output_tokens / report.completed)
    output = report.figure(_OUTPUT)
    requests = report.figure(_REQUESTS)
    return output / requests if output is not None and requests is not None and requests.value else None


def prompt_tokens(report: Report) -> Rounded | None:
    """Derive a prompt's tokens in the same way."""
    if report.rounding and report.completed and report.input_tokens is not None:
        return Rounded.of(report.input_tokens / report.completed)
    total = report.figure(_TOTAL)
    output = report.figure(_OUTPUT)
    requests = report.figure(_REQUESTS)
    if total is None or output is None or requests is None or not requests.value:
        return None
    return (total - output) / requests


def decoded_tokens(report: Report) -> Rounded | None:
    """Derive a request's output tokens from the latencies: E2E = TTFT + (L - 1) · TPOT."""
    ttft = report.figure("Mean TTFT (ms)")
    tpot = report.figure(_TPOT)
    e2e = report.figure(_E2E)
    if ttft is None or e2e is None or tpot is None or not tpot.value:
        return None
    return Rounded.of(1) + (e2e - ttft) / tpot


def in_flight(report: Report) -> Rounded | None:
    """Derive the requests in flight on average: Little's law."""
    requests = report.figure(_REQUESTS)
    e2e = report.figure(_E2E)
    return requests * e2e / _SECOND if requests is not None and e2e is not None else None


def _stated_tokens(report: Report, stated: Stated) -> Rounded | None:
    """Give the output tokens of every request, if they are stated and the throughputs agree; None otherwise."""
    by_rate = output_tokens(report)
    if stated.output_tokens is None or by_rate is None:
        return None
    every = Rounded.of(stated.output_tokens)
    return every if by_rate.equals(every, EXACT) else None


def _stated_in_flight(report: Report, stated: Stated) -> Rounded | None:
    """Derive the requests in flight without E2E latency, from TTFT and TPOT of outputs of a stated length."""
    every = _stated_tokens(report, stated)
    ttft = report.figure("Mean TTFT (ms)")
    tpot = report.figure(_TPOT)
    requests = report.figure(_REQUESTS)
    if every is None or ttft is None or tpot is None or not tpot.value or requests is None:
        return None
    return requests * (ttft + (every - Rounded.of(1)) * tpot) / _SECOND


def check_latency(report: Report, stated: Stated) -> Verdicts:
    """Compare tokens by rate and by time: equal if all outputs have the same length.

    Otherwise the mean of products differs from the product of means.
    """
    by_rate = output_tokens(report)
    by_time = decoded_tokens(report)
    every = _stated_tokens(report, stated)
    if by_time is not None and by_time.high < 1:
        yield "cannot be true", "E2E latency below TTFT"
    elif by_rate is not None and by_time is not None:
        if by_rate.equals(by_time, EXACT):
            figures = f"{by_rate.value:.2f} by throughput, {by_time.value:.2f} by time"
            yield "holds", f"every request put out {by_rate.value:.0f} tokens: {figures}"
        elif every is not None and not every.equals(by_time, LOOSE):
            yield "cannot be true", f"{every.value:.0f} output tokens as stated: {by_time.value:.1f} by mean times"
        else:
            figures = f"{by_rate.value:.1f} tokens on average, {by_time.value:.1f} by mean times"
            yield "follows", f"outputs differ in length: {figures}"
    if stated.output_tokens and by_rate is not None and not by_rate.equals(Rounded.of(stated.output_tokens), EXACT):
        figures = f"a request put out {by_rate.value:.1f}"
        yield "cannot be true", f"{stated.output_tokens} output tokens as stated: {figures}"


def check_in_flight(report: Report, stated: Stated) -> Verdicts:
    """Compare requests in flight with the client's limit, and with its own average."""
    under_way = in_flight(report) or _stated_in_flight(report, stated)
    most = report.concurrency
    if under_way is None:
        return
    if report.mean_in_flight is not None:
        printed = Rounded.of(report.mean_in_flight, report.rounding)
        yield identity("requests/s · E2E", under_way, "requests under way as reported", printed)
    if most is None:
        yield "follows", f"{under_way.value:.1f} requests under way on average"
    elif under_way.low > most * (1 + LOOSE):
        average = f"{under_way.value:.2f} requests under way on average"
        yield "cannot be true", f"{average}, at a concurrency of {most}"
    else:
        yield "holds", f"{under_way.value:.2f} of {most} requests under way on average"


def check_totals(report: Report, _: Stated) -> Verdicts:
    """Compare throughputs times duration with totals."""
    totals = {_REQUESTS: report.completed, _OUTPUT: report.output_tokens}
    if report.input_tokens is not None and report.output_tokens is not None:
        totals[_TOTAL] = report.input_tokens + report.output_tokens
    seconds = None if report.duration is None else Rounded.of(report.duration, report.rounding)
    for name, total in totals.items():
        rate = report.figure(name)
        if seconds is not None and seconds.value and total is not None and rate is not None:
            yield identity(f"{name} · duration", rate * seconds, "the total", Rounded.of(total))
    total = report.figure(_TOTAL)
    output = report.figure(_OUTPUT)
    if total is not None and output is not None and total.high < output.low * (1 - EXACT):
        described = f"total throughput {total.value:g}"
        yield "cannot be true", f"{described} below output throughput {output.value:g}"


def check_order(report: Report, _: Stated) -> Verdicts:
    """Compare medians with 99th percentiles."""
    for what in LATENCIES:
        median = report.figures.get(f"Median {what} (ms)")
        most = report.figures.get(f"P99 {what} (ms)")
        if median is not None and most is not None and median > most:
            yield "cannot be true", f"median {what} {median:g} ms above its P99, {most:g} ms"


def check_delivery(report: Report, _: Stated) -> Verdicts:
    """Compare gaps between deliveries with times per token: number of tokens per delivery."""
    tpot = report.figure(_TPOT)
    itl = report.figure("Mean ITL (ms)")
    by_rate = output_tokens(report)
    by_time = decoded_tokens(report)
    if tpot is None or itl is None or not tpot.value or not itl.value:
        return
    fixed = by_rate is not None and by_time is not None and by_rate.equals(by_time, EXACT)
    if fixed and itl.high < tpot.low * (1 - EXACT):
        latencies = f"ITL {itl.value:g} ms below TPOT {tpot.value:g} ms"
        yield "cannot be true", f"{latencies}: deliveries hold at least one token each"
    else:
        yield "follows", f"{itl.value / tpot.value:.2f} tokens come together"


def check_details(report: Report, _: Stated) -> Verdicts:
    """Compare the figures of every request with the totals and statistics made of them."""
    details = report.details
    if details is None:
        return
    totals = {
        "requests": (report.completed, details.completed),
        "prompt tokens": (report.input_tokens, details.input_tokens),
        "output tokens": (report.output_tokens, details.output_tokens),
    }
    for what, (stated, listed) in totals.items():
        if stated is not None and listed is not None and stated != listed:
            yield "cannot be true", f"{stated:,} {what} in all, those listed are {listed:,}"
    for name, value in details.statistics().items():
        printed = report.figure(name)
        if printed is not None:
            yield identity(name, printed, "of the requests listed", Rounded.of(value))


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of an identity on one report."""

    report: str  # label of the run
    identity: str  # name of the identity
    verdict: Verdict  # holds, cannot be true, or follows: a figure that follows from others
    says: str  # the reason, with figures


def lint(report: Report, stated: Stated = NOTHING_STATED, parts: Sequence[ToolFigures] = ()) -> list[Finding]:
    """Check every identity that the report, or one of its parts, has the figures for.

    A mean TPOT or ITL of 0 counts as missing: clients write it where they measured nothing. A printed figure stands for
    all numbers that are printed alike.
    """
    findings = [
        Finding(report.label, identity, verdict, says)
        for identity, check in IDENTITIES.items()
        for verdict, says in check(report, stated)
    ]
    return findings + [
        Finding(report.label, identity, verdict, f"{part.label}: {says}")
        for part in parts
        for identity, verdict, says in verdicts(replace(part, num_steps=part.num_steps or stated.num_drafts))
    ]


IDENTITIES: dict[str, Callable[[Report, Stated], Verdicts]] = {
    "accept length = 1 + K · accept rate": check_rate,
    "accept length ≤ drafts + 1": check_length,
    "accepted ≤ proposed drafts": check_counts,
    "accept length = 1 + Σ rates by position": check_positions,
    "E2E = TTFT + (L - 1) · TPOT": check_latency,
    "requests/s · E2E ≤ concurrency": check_in_flight,
    "throughput · duration = total": check_totals,
    "median ≤ P99": check_order,
    "ITL / TPOT = tokens a delivery": check_delivery,
    "statistics = those of the requests listed": check_details,
    "round = accept length · TPOT": check_round,
}
DERIVED: dict[str, Callable[[Report], Rounded | None]] = {
    "prompt": prompt_tokens,
    "output": output_tokens,
    "by times": decoded_tokens,
    "drafts": num_drafts,
    "under way": in_flight,
}


def derived(report: Report) -> dict[str, float | None]:
    """Derive further figures: tokens of a prompt, of an output by rates and by times, drafts, requests."""
    figures = {name: derive(report) for name, derive in DERIVED.items()}
    return {name: None if figure is None else figure.value for name, figure in figures.items()}


def report_of(record: AcceptanceRecord) -> Report:
    """Make a report of a record: the accept length that its tool states, next to the counts."""
    total = record.total
    length = record.accept_length if record.reported_length is None else record.reported_length
    is_fixed = total is None or not total.reached or total.reached[0] == total.rounds  # each round has drafts
    named = f", {record.pair}" if record.pair else ""
    return Report(
        f"{record.tool}{named}",
        {SPECULATION[0]: length},
        rates_by_position=record.rates,
        num_rounds=None if total is None else total.rounds,
        num_drafts=record.proposed_drafts if record.is_chain and is_fixed else None,
        num_accepted_drafts=None if total is None else total.accepted_drafts,
        rounding=record.reported_rounding,
    )


def stated_of(record: AcceptanceRecord, stated: Stated) -> Stated:
    """Add the number of steps that a record of a chain names to what a user states."""
    if stated.num_drafts is not None or not record.is_chain:
        return stated
    return Stated(stated.output_tokens, record.num_steps)
