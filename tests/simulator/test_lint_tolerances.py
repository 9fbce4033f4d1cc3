"""Tolerances of identities, from both sides: just inside and just outside."""

import numpy as np
import pytest

from specsim.simulator.lint import NOTHING_STATED, Stated, lint
from specsim.simulator.measurement import Report, RequestDetails

LENGTH, RATE = "Spec Decode Accept Length", "Spec Decode Accept Rate (%)"
OUTPUT, REQUESTS, TOTAL = "Output Throughput (tok/s)", "Request Throughput (req/s)", "Total Token Throughput (tok/s)"
TTFT, TPOT, ITL, E2E = (f"Mean {what} (ms)" for what in ("TTFT", "TPOT", "ITL", "E2E Latency"))


def verdicts(report: Report, identity: str, stated: Stated = NOTHING_STATED) -> set[str]:
    return {finding.verdict for finding in lint(report, stated) if finding.identity == identity}


def report(figures: dict[str, float], **fields) -> Report:
    return Report("a run", figures, **fields)


def off(share: float):
    """Relative differences just inside and just outside of a share, upwards and downwards."""
    return [(1 + side * share * edge, edge < 1) for side in (1, -1) for edge in (0.99, 1.01)]


@pytest.mark.parametrize(("factor", "is_true"), off(3e-3))
def test_a_number_of_drafts_may_be_off_by_three_thousandths(factor, is_true):
    found = report({LENGTH: 1 + 1.5 * factor, RATE: 50.0})
    assert verdicts(found, "accept length = 1 + K · accept rate") == {"holds" if is_true else "cannot be true"}


@pytest.mark.parametrize(
    ("figures", "is_true"),
    [
        ({RATE: 100.0}, True),
        ({RATE: 100.0001}, False),
        ({LENGTH: 1.0}, True),
        ({LENGTH: 0.9999}, False),
        ({LENGTH: 1.00099, RATE: 0.0}, True),
        ({LENGTH: 1.00101, RATE: 0.0}, False),
        ({LENGTH: 1.4, RATE: 40.0}, True),  # one draft a round is the least
        ({LENGTH: 1.2, RATE: 40.0}, False),
    ],
)
def test_limits_of_acceptance(figures, is_true):
    assert ("cannot be true" not in verdicts(report(figures), "accept length = 1 + K · accept rate")) == is_true


@pytest.mark.parametrize(("rate", "is_true"), [(0.4, True), (50.0, False)])
def test_a_round_that_accepts_nothing_accepts_at_no_rate(rate, is_true):
    """An accept length printed as 1.00 is at most 1.005."""
    found = report({LENGTH: 1.00, RATE: rate}, rounding=0.005)
    assert ("cannot be true" not in verdicts(found, "accept length = 1 + K · accept rate")) == is_true


@pytest.mark.parametrize(("drafts", "is_true"), [(3, True), (2, False), (4, False)])
def test_drafts_as_stated_are_those_of_the_figures(drafts, is_true):
    found = verdicts(
        report({LENGTH: 2.5, RATE: 50.0}), "accept length = 1 + K · accept rate", Stated(num_drafts=drafts)
    )
    assert ("cannot be true" not in found) == is_true


@pytest.mark.parametrize(
    ("counts", "stated", "is_true"),
    [
        ((100, 300, 300), None, True),
        ((100, 300, 301), None, False),
        ((100, 300, 900), None, False),
        ((100, 100, 50), None, True),
        ((100, 99, 50), None, False),
        ((100, 300, 50), 3, True),
        ((100, 250, 50), 3, True),  # fewer than stated: some rounds propose less
        ((100, 301, 50), 3, False),
        ((0, 0, 0), 3, True),
    ],
)
def test_counts_of_drafts_fit_together(counts, stated, is_true):
    rounds, drafts, accepted = counts
    found = report({}, num_rounds=rounds, num_drafts=drafts, num_accepted_drafts=accepted)
    assert ("cannot be true" not in verdicts(found, "accepted ≤ proposed drafts", Stated(num_drafts=stated))) == is_true


@pytest.mark.parametrize(("factor", "is_true"), off(1e-3))
def test_accept_length_and_rate_are_those_of_the_counts(factor, is_true):
    counts = {"num_rounds": 100, "num_drafts": 370, "num_accepted_drafts": 185}
    for figures in ({LENGTH: 2.85 * factor}, {RATE: 50.0 * factor}, {LENGTH: 2.85 * factor, RATE: 50.0}):
        found = report(figures, **counts)
        assert ("cannot be true" not in verdicts(found, "accepted ≤ proposed drafts")) == is_true
        assert verdicts(found, "accept length = 1 + K · accept rate") == set()  # 3.7 drafts a round are possible


@pytest.mark.parametrize(
    ("rates", "is_true"),
    [((0.4, 0.40099), True), ((0.4, 0.40101), False), ((0.4, 0.4, 0.1), True), ((0.1, 0.2), False)],
)
def test_rates_by_position_never_increase(rates, is_true):
    found = verdicts(report({}, rates_by_position=rates), "accept length = 1 + Σ rates by position")
    assert ("cannot be true" not in found) == is_true


@pytest.mark.parametrize(("factor", "is_true"), off(1e-3))
def test_an_accept_length_is_the_sum_of_the_rates(factor, is_true):
    found = report({LENGTH: 2 * factor}, rates_by_position=(0.6, 0.3, 0.1))
    assert ("cannot be true" not in verdicts(found, "accept length = 1 + Σ rates by position")) == is_true


@pytest.mark.parametrize(("factor", "is_equal"), off(1e-3))
def test_outputs_by_rate_and_by_time_are_equal_or_differ(factor, is_equal):
    figures = {OUTPUT: 1280.0, REQUESTS: 10.0, TTFT: 30.0, TPOT: 2.0, E2E: 30.0 + 2.0 * (128 * factor - 1)}
    assert verdicts(report(figures), "E2E = TTFT + (L - 1) · TPOT") == {"holds" if is_equal else "follows"}


@pytest.mark.parametrize(("e2e", "is_true"), [(30.0, True), (29.999, False)])
def test_a_request_does_not_end_before_its_first_token(e2e, is_true):
    found = verdicts(report({TTFT: 30.0, TPOT: 2.0, E2E: e2e}), "E2E = TTFT + (L - 1) · TPOT")
    assert ("cannot be true" not in found) == is_true


@pytest.mark.parametrize(("factor", "is_true"), off(1e-3))
def test_output_tokens_are_those_stated(factor, is_true):
    found = report({OUTPUT: 1280.0 * factor, REQUESTS: 10.0})
    assert ("cannot be true" not in verdicts(found, "E2E = TTFT + (L - 1) · TPOT", Stated(128))) == is_true


@pytest.mark.parametrize(("e2e", "is_true"), [(402.0 - 0.1, True), (402.0 + 0.1, False), (10.0, True)])
def test_requests_under_way_stay_below_the_concurrency(e2e, is_true):
    found = verdicts(report({REQUESTS: 10.0, E2E: e2e}, concurrency=4), "requests/s · E2E ≤ concurrency")
    assert found == {"holds" if is_true else "cannot be true"}


@pytest.mark.parametrize(("factor", "is_true"), off(1e-3))
def test_requests_under_way_are_those_reported(factor, is_true):
    found = report({REQUESTS: 10.0, E2E: 350.0}, concurrency=4, mean_in_flight=3.5 * factor)
    assert ("cannot be true" not in verdicts(found, "requests/s · E2E ≤ concurrency")) == is_true


@pytest.mark.parametrize("name", [OUTPUT, REQUESTS, TOTAL])
@pytest.mark.parametrize(("factor", "is_true"), off(1e-3))
def test_throughputs_times_the_duration_are_the_totals(name, factor, is_true):
    figures = {OUTPUT: 128.0, REQUESTS: 1.0, TOTAL: 628.0}
    totals = {"duration": 50.0, "completed": 50, "input_tokens": 25_000, "output_tokens": 6400}
    found = report(figures | {name: figures[name] * factor}, **totals)
    assert ("cannot be true" not in verdicts(found, "throughput · duration = total")) == is_true


@pytest.mark.parametrize(("total", "is_true"), [(99.91, True), (99.89, False), (500.0, True)])
def test_all_tokens_are_at_least_those_put_out(total, is_true):
    found = verdicts(report({OUTPUT: 100.0, TOTAL: total}), "throughput · duration = total")
    assert found == (set() if is_true else {"cannot be true"})


@pytest.mark.parametrize("what", ["TTFT", "TPOT", "ITL", "E2E Latency"])
def test_a_median_is_at_most_the_99th_percentile(what):
    for median, found in ((5.0, set()), (np.nextafter(5.0, 6.0), {"cannot be true"})):
        figures = {f"Median {what} (ms)": float(median), f"P99 {what} (ms)": 5.0}
        assert verdicts(report(figures), "median ≤ P99") == found


@pytest.mark.parametrize(("itl", "is_true"), [(1.9981, True), (1.9979, False), (5.0, True)])
def test_a_delivery_holds_at_least_one_token(itl, is_true):
    figures = {OUTPUT: 1280.0, REQUESTS: 10.0, TTFT: 30.0, TPOT: 2.0, E2E: 284.0, ITL: itl}
    found = verdicts(report(figures), "ITL / TPOT = tokens a delivery")
    assert found == {"follows" if is_true else "cannot be true"}


@pytest.mark.parametrize("name", ["Mean TTFT (ms)", "Median TTFT (ms)", "P99 TTFT (ms)", "Mean ITL (ms)"])
@pytest.mark.parametrize(("factor", "is_true"), off(1e-3))
def test_statistics_are_those_of_the_requests(name, factor, is_true):
    values = np.array([10.0, 20.0, 60.0])
    details = RequestDetails(3, None, None, {"TTFT": values, "ITL": values})
    statistic = {"Mean": 30.0, "Median": 20.0, "P99": 59.2}[name.split()[0]]
    found = verdicts(report({name: statistic * factor}, details=details), "statistics = those of the requests listed")
    assert found == {"holds" if is_true else "cannot be true"}


@pytest.mark.parametrize(
    ("totals", "is_true"), [((3, 40, 50), True), ((4, 40, 50), False), ((3, 41, 50), False), ((3, 40, 49), False)]
)
def test_totals_are_those_of_the_requests(totals, is_true):
    completed, prompts, outputs = totals
    found = report(
        {}, completed=completed, input_tokens=prompts, output_tokens=outputs, details=RequestDetails(3, 40, 50, {})
    )
    assert verdicts(found, "statistics = those of the requests listed") == (set() if is_true else {"cannot be true"})


@pytest.mark.parametrize(
    ("completed", "is_true"), [(28_000, True), (27_474, True), (27_470, False), (28_527, True), (28_531, False)]
)
def test_a_printed_figure_stands_for_all_that_print_so(completed, is_true):
    """0.28 requests per second for 100,000.00 s are 27,500 to 28,500 requests, plus or minus a thousandth."""
    found = report({REQUESTS: 0.28}, duration=100_000.0, completed=completed, rounding=0.005)
    assert verdicts(found, "throughput · duration = total") == {"holds" if is_true else "cannot be true"}


@pytest.mark.parametrize(("position", "is_true"), [(0.49295, True), (0.49285, False)])
def test_printed_rates_by_position_are_rounded_percents(position, is_true):
    """2.00 is at least 1.995, with a tolerance of two thousandths. 1 + 0.5 + 0.4929 and 2 · 0.00005 just reach it."""
    found = report({LENGTH: 2.00}, rates_by_position=(0.5, position), rounding=0.005)
    assert ("cannot be true" not in verdicts(found, "accept length = 1 + Σ rates by position")) == is_true
