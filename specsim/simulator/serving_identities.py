"""Identities of the throughputs and latencies in a benchmark's report."""

from specsim.simulator.measurement import LATENCIES, Report
from specsim.simulator.rounded import Rounded
from specsim.simulator.verdict import EXACT, Stated, Verdicts, identity

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
            found = f"{by_rate.value:.2f} by throughput, {by_time.value:.2f} by time"
            yield "holds", f"every request put out {by_rate.value:.0f} tokens: {found}"
        elif every is not None and not every.equals(by_time, LOOSE):
            yield "cannot be true", f"{every.value:.0f} output tokens as stated: {by_time.value:.1f} by mean times"
        else:
            found = f"{by_rate.value:.1f} tokens on average, {by_time.value:.1f} by mean times"
            yield "follows", f"outputs differ in length: {found}"
    if stated.output_tokens and by_rate is not None and not by_rate.equals(Rounded.of(stated.output_tokens), EXACT):
        found = f"a request put out {by_rate.value:.1f}"
        yield "cannot be true", f"{stated.output_tokens} output tokens as stated: {found}"


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
        found = f"{under_way.value:.2f} requests under way on average"
        yield "cannot be true", f"{found}, at a concurrency of {most}"
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
        found = f"total throughput {total.value:g}"
        yield "cannot be true", f"{found} below output throughput {output.value:g}"


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
        found = f"ITL {itl.value:g} ms below TPOT {tpot.value:g} ms"
        yield "cannot be true", f"{found}: deliveries hold at least one token each"
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
    for what, (stated, found) in totals.items():
        if stated is not None and found is not None and stated != found:
            yield "cannot be true", f"{stated:,} {what} in all, those listed are {found:,}"
    for name, found in details.statistics().items():
        printed = report.figure(name)
        if printed is not None:
            yield identity(name, printed, "of the requests listed", Rounded.of(found))
