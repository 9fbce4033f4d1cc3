"""Tolerances of identities, from both sides: just inside and just outside."""

import numpy as np
import pytest

from specsim.simulator.lint import LOOSE, NOTHING_STATED, Stated, lint
from specsim.simulator.measurement import Report, RequestDetails, Rounded
from specsim.simulator.tool_figures import EXACT

LENGTH, RATE = "Spec Decode Accept Length", "Spec Decode Accept Rate (%)"
OUTPUT, REQUESTS, TOTAL = "Output Throughput (tok/s)", "Request Throughput (req/s)", "Total Token Throughput (tok/s)"
TTFT, TPOT, ITL, E2E = (f"Mean {what} (ms)" for what in ("TTFT", "TPOT", "ITL", "E2E Latency"))
ACCEPTANCE, POSITIONS = "accept length = 1 + K · accept rate", "accept length = 1 + Σ rates by position"
COUNTS, TOTALS = "accepted ≤ proposed drafts", "throughput · duration = total"
TIMES, UNDER_WAY = "E2E = TTFT + (L - 1) · TPOT", "requests/s · E2E ≤ concurrency"
MEDIANS, DELIVERIES = "median ≤ P99", "ITL / TPOT = tokens a delivery"
LISTED = "statistics = those of the requests listed"
OF_128_TOKENS = {OUTPUT: 1280.0, REQUESTS: 10.0, TTFT: 30.0, TPOT: 2.0, E2E: 284.0}


def verdicts(report: Report, identity: str, stated: Stated = NOTHING_STATED) -> set[str]:
    return {finding.verdict for finding in lint(report, stated) if finding.identity == identity}


def report(figures: dict[str, float], **fields) -> Report:
    return Report("a run", figures, **fields)


def counted(figures: dict[str, float]) -> Report:
    """3.7 drafts a round, half of them accepted."""
    return report(figures, num_rounds=100, num_drafts=370, num_accepted_drafts=185)


def of_50_seconds(figures: dict[str, float]) -> Report:
    right = {OUTPUT: 128.0, REQUESTS: 1.0, TOTAL: 628.0}
    return report(right | figures, duration=50.0, completed=50, input_tokens=25_000, output_tokens=6400)


def listed(figures: dict[str, float], **totals) -> Report:
    values = np.array([10.0, 20.0, 60.0])
    return report(figures, details=RequestDetails(3, 40, 50, {"TTFT": values, "ITL": values}), **totals)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(
    ("identity", "share", "report_of"),
    [
        (ACCEPTANCE, 3e-3, lambda factor: report({LENGTH: 1 + 1.5 * factor, RATE: 50.0})),
        (COUNTS, 1e-3, lambda factor: counted({LENGTH: 2.85 * factor})),
        (COUNTS, 1e-3, lambda factor: counted({RATE: 50.0 * factor})),
        (COUNTS, 1e-3, lambda factor: counted({LENGTH: 2.85 * factor, RATE: 50.0})),
        (POSITIONS, 1e-3, lambda factor: report({LENGTH: 2 * factor}, rates_by_position=(0.6, 0.3, 0.1))),
        (UNDER_WAY, 1e-3, lambda factor: report({REQUESTS: 10, E2E: 350}, concurrency=4, mean_in_flight=3.5 * factor)),
        (TOTALS, 1e-3, lambda factor: of_50_seconds({OUTPUT: 128.0 * factor})),
        (TOTALS, 1e-3, lambda factor: of_50_seconds({REQUESTS: factor})),
        (TOTALS, 1e-3, lambda factor: of_50_seconds({TOTAL: 628.0 * factor})),
        (LISTED, 1e-3, lambda factor: listed({"Mean TTFT (ms)": 30.0 * factor})),
        (LISTED, 1e-3, lambda factor: listed({"Median TTFT (ms)": 20.0 * factor})),
        (LISTED, 1e-3, lambda factor: listed({"P99 TTFT (ms)": 59.2 * factor})),
        (LISTED, 1e-3, lambda factor: listed({"Mean ITL (ms)": 30.0 * factor})),
    ],
)
def test_a_figure_may_be_off_by_a_share(identity, share, report_of, side):
    inside, outside = (verdicts(report_of(1 + side * share * edge), identity) for edge in (0.99, 1.01))
    assert inside - {"follows"} == {"holds"}
    assert "cannot be true" in outside


def test_a_number_of_drafts_a_round_need_not_be_whole():
    assert verdicts(counted({LENGTH: 2.85, RATE: 50.0}), ACCEPTANCE) == set()


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(
    ("edge", "by_times", "as_stated"), [(0.99, {"holds"}, False), (1.01, {"follows"}, True)], ids=["inside", "outside"]
)
def test_output_tokens_may_be_off_by_a_thousandth(side, edge, by_times, as_stated):
    """By rate and by time they may differ, as outputs do, and as stated they may not."""
    factor = 1 + side * 1e-3 * edge
    assert verdicts(report(OF_128_TOKENS | {E2E: 30.0 + 2.0 * (128 * factor - 1)}), TIMES) == by_times
    rates = report({OUTPUT: 1280.0 * factor, REQUESTS: 10.0})
    assert ("cannot be true" in verdicts(rates, TIMES, Stated(128))) == as_stated


@pytest.mark.parametrize(
    ("identity", "possible", "impossible"),
    [
        (ACCEPTANCE, {RATE: 100.0}, {RATE: 100.0001}),
        (ACCEPTANCE, {LENGTH: 1.0}, {LENGTH: 0.9999}),
        (ACCEPTANCE, {LENGTH: 1.00099, RATE: 0.0}, {LENGTH: 1.00101, RATE: 0.0}),
        (ACCEPTANCE, {LENGTH: 1.4, RATE: 40.0}, {LENGTH: 1.2, RATE: 40.0}),  # one draft a round is the least
        (ACCEPTANCE, {LENGTH: 1.00099, RATE: 0.0}, {LENGTH: 1.0, RATE: 40.0}),
        (TIMES, {TTFT: 30.0, TPOT: 2.0, E2E: 30.0}, {TTFT: 30.0, TPOT: 2.0, E2E: 29.999}),
        (TOTALS, {OUTPUT: 100.0, TOTAL: 99.91}, {OUTPUT: 100.0, TOTAL: 99.89}),
        (TOTALS, {OUTPUT: 100.0, TOTAL: 500.0}, {OUTPUT: 100.0, TOTAL: 50.0}),
        (DELIVERIES, OF_128_TOKENS | {ITL: 1.9981}, OF_128_TOKENS | {ITL: 1.9979}),
    ],
)
def test_figures_have_limits(identity, possible, impossible):
    assert "cannot be true" not in verdicts(report(possible), identity)
    assert "cannot be true" in verdicts(report(impossible), identity)


@pytest.mark.parametrize("what", ["TTFT", "TPOT", "ITL", "E2E Latency"])
def test_a_median_is_at_most_the_99th_percentile(what):
    for median, found in ((5.0, set()), (np.nextafter(5.0, 6.0), {"cannot be true"})):
        figures = {f"Median {what} (ms)": float(median), f"P99 {what} (ms)": 5.0}
        assert verdicts(report(figures), MEDIANS) == found


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
    assert ("cannot be true" not in verdicts(found, COUNTS, Stated(num_drafts=stated))) == is_true


@pytest.mark.parametrize(("drafts", "is_true"), [(3, True), (2, False), (4, False)])
def test_drafts_as_stated_are_those_of_the_figures(drafts, is_true):
    found = verdicts(report({LENGTH: 2.5, RATE: 50.0}), ACCEPTANCE, Stated(num_drafts=drafts))
    assert ("cannot be true" not in found) == is_true


@pytest.mark.parametrize(
    ("identity", "found", "is_true"),
    [
        (POSITIONS, report({}, rates_by_position=(0.4, 0.40099)), True),
        (POSITIONS, report({}, rates_by_position=(0.4, 0.40101)), False),
        (POSITIONS, report({}, rates_by_position=(0.4, 0.4, 0.1)), True),
        (POSITIONS, report({}, rates_by_position=(0.1, 0.2)), False),
        (UNDER_WAY, report({REQUESTS: 10.0, E2E: 402.0 - 0.1}, concurrency=4), True),
        (UNDER_WAY, report({REQUESTS: 10.0, E2E: 402.0 + 0.1}, concurrency=4), False),
        (UNDER_WAY, report({REQUESTS: 10.0, E2E: 10.0}, concurrency=4), True),
        (LISTED, listed({}, completed=3, input_tokens=40, output_tokens=50), True),
        (LISTED, listed({}, completed=4, input_tokens=40, output_tokens=50), False),
        (LISTED, listed({}, completed=3, input_tokens=41, output_tokens=50), False),
        (LISTED, listed({}, completed=3, input_tokens=40, output_tokens=49), False),
        # An accept length printed as 1.00 is at most 1.005.
        (ACCEPTANCE, report({LENGTH: 1.00, RATE: 0.4}, rounding=0.005), True),
        (ACCEPTANCE, report({LENGTH: 1.00, RATE: 50.0}, rounding=0.005), False),
        # 2.00 is at least 1.995, with a tolerance of two thousandths. 1 + 0.5 + 0.4929 and 2 · 0.00005 just reach it.
        (POSITIONS, report({LENGTH: 2.00}, rates_by_position=(0.5, 0.49295), rounding=0.005), True),
        (POSITIONS, report({LENGTH: 2.00}, rates_by_position=(0.5, 0.49285), rounding=0.005), False),
    ],
)
def test_other_fields_have_limits(identity, found, is_true):
    assert ("cannot be true" not in verdicts(found, identity)) == is_true


@pytest.mark.parametrize(
    ("completed", "is_true"), [(28_000, True), (27_474, True), (27_470, False), (28_527, True), (28_531, False)]
)
def test_a_printed_figure_stands_for_all_that_print_so(completed, is_true):
    """0.28 requests per second for 100,000.00 s are 27,500 to 28,500 requests, plus or minus a thousandth."""
    found = report({REQUESTS: 0.28}, duration=100_000.0, completed=completed, rounding=0.005)
    assert verdicts(found, TOTALS) == {"holds" if is_true else "cannot be true"}


ALIKE = {TTFT: 1.0, TPOT: 1.0, REQUESTS: 1.0, OUTPUT: 1000.0}
TOKENS = {TTFT: 10.0, TPOT: 10.0, E2E: 1280.0, REQUESTS: 1.0, OUTPUT: 128.0}
# By identity: a report of one figure, the last number that may be true, the side on which it cannot, what is stated.
BOUNDS = [
    (ACCEPTANCE, lambda x: report({RATE: x}), 100.0, 1, NOTHING_STATED),
    (ACCEPTANCE, lambda x: report({LENGTH: x}), 1.0, -1, NOTHING_STATED),
    ("accept length ≤ drafts + 1", lambda x: report({LENGTH: x}), 4 * (1 + EXACT), 1, Stated(num_drafts=3)),
    (POSITIONS, lambda x: report({}, rates_by_position=(0.5, x)), 0.5 + EXACT, 1,
     NOTHING_STATED),
    (TIMES, lambda x: report(TOKENS | {E2E: x, TPOT: 1.0}), 10.0, -1, NOTHING_STATED),
    (TIMES, lambda x: report(ALIKE | {E2E: x}), 995.0, -1, Stated(output_tokens=1000)),
    (TIMES, lambda x: report(ALIKE | {OUTPUT: x}), 999.0, -1, Stated(output_tokens=1000)),
    (UNDER_WAY, lambda x: report({REQUESTS: x, E2E: 1e3}, concurrency=8), 8 * (1 + LOOSE), 1,
     NOTHING_STATED),
    (TOTALS, lambda x: report({TOTAL: x, OUTPUT: 1e3}), 1e3 * (1 - EXACT), -1, NOTHING_STATED),
    (TOTALS, lambda x: report({OUTPUT: x}, duration=1.0, output_tokens=1000), 999.0, -1,
     NOTHING_STATED),
    (MEDIANS, lambda x: report({"Median ITL (ms)": x, "P99 ITL (ms)": 5.0}), 5.0, 1, NOTHING_STATED),
    (DELIVERIES, lambda x: report(TOKENS | {ITL: x}), 10 * (1 - EXACT), -1, NOTHING_STATED),
]  # fmt: skip


@pytest.mark.parametrize(("identity", "of", "bound", "side", "stated"), BOUNDS)
def test_a_figure_at_the_bound_can_be_true_and_the_next_one_not(identity, of, bound, side, stated):
    assert "cannot be true" not in verdicts(of(bound), identity, stated)
    assert "cannot be true" in verdicts(of(float(np.nextafter(bound, side * np.inf))), identity, stated)


@pytest.mark.parametrize(("rounds", "drafts", "accepted", "is_true"), [
    (10, 30, 30, True), (10, 30, 31, False), (10, 10, 5, True), (10, 9, 5, False), (10, 31, 5, False),
])  # fmt: skip
def test_counts_may_be_equal(rounds, drafts, accepted, is_true):
    found = report({}, num_rounds=rounds, num_drafts=drafts, num_accepted_drafts=accepted)
    assert ("cannot be true" not in verdicts(found, COUNTS, Stated(num_drafts=3))) == is_true


def test_integers_at_the_ends_of_the_margin_count():
    """999 and 1001 are a thousandth away from 1000."""
    assert Rounded.of(1000).integers(EXACT) == range(999, 1002)
    assert Rounded.of(np.nextafter(1000, 0)).integers(EXACT) == range(999, 1001)
