"""Intervals hold the true accept length as often as they say, and are the same at every call."""

import numpy as np
import pytest

from specsim.acceptance.interval import bootstrap_ratio, length_interval, rate_intervals
from specsim.core.metrics import acceptance
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts


def record(*counts: Counts, is_by_request: bool = True) -> AcceptanceRecord:
    return AcceptanceRecord.of_counts(counts, "a file", "a tool", "as it counts.", is_by_request=is_by_request)


def requests(seed: int, number: int, rounds: int = 20) -> list[Counts]:
    """Requests of a chain of one draft, whose acceptance differs from request to request; 0.6 on average."""
    rng = np.random.default_rng(seed)
    return [
        Counts.of_rounds((rng.random(rounds) < rng.choice([0.3, 0.9])).astype(int).tolist(), 1) for _ in range(number)
    ]


def test_bootstrap_intervals_hold_the_true_length():
    """At least 88 of 100 intervals at 95 % hold it; fewer have a probability of 0.004."""
    held = [length_interval(record(*requests(seed, 40))) for seed in range(100)]
    assert sum(each.low <= 1.6 <= each.high for each in held) >= 88


def test_rounds_of_one_request_are_alike():
    """Requests differ, so that the interval of independent rounds is too short."""
    counts = requests(1, 40)
    by_request, by_round = length_interval(record(*counts)), length_interval(record(*counts, is_by_request=False))
    assert by_request.high - by_request.low > 1.5 * (by_round.high - by_round.low)
    assert by_request.method == "bootstrap over 40 requests"
    assert by_round.method == "rounds taken as independent"


def test_an_interval_is_the_same_at_every_call():
    counts = requests(2, 10)
    assert length_interval(record(*counts)) == length_interval(record(*counts))


def test_equal_requests_leave_no_doubt():
    found = length_interval(record(*[Counts.of_rounds([1, 0], 1)] * 5))
    assert (found.low, found.high) == (1.5, 1.5)


def test_independent_rounds_have_the_deviation_of_the_counts():
    drafts = [3, 0, 1, 3, 2, 0, 3, 1] * 50
    found = length_interval(record(Counts.of_rounds(drafts, 3), is_by_request=False))
    half = 1.959964 * np.std(drafts) / np.sqrt(len(drafts))
    assert (found.low, found.high) == pytest.approx((1 + np.mean(drafts) - half, 1 + np.mean(drafts) + half))


def test_without_counts_there_is_no_interval():
    assert length_interval(AcceptanceRecord("", "", "", 2.5)) is None
    assert length_interval(record(Counts(10, 4), is_by_request=False)) is None
    assert rate_intervals(AcceptanceRecord("", "", "", 2.5, rates=(0.5,))) is None


@pytest.mark.parametrize("is_conditional", [False, True])
@pytest.mark.parametrize("is_by_request", [False, True])
def test_rates_lie_within_their_intervals(is_by_request, is_conditional):
    counts = [Counts.of_rounds([3, 1, 0, 2], 3), Counts.of_rounds([0, 1], 3), Counts.of_histogram([1, 0, 3])]
    found = record(*counts, is_by_request=is_by_request)
    rates = found.conditional if is_conditional else found.rates
    bands = rate_intervals(found, is_conditional)
    assert len(bands) == 3
    assert all(0 <= band.low <= rate <= band.high <= 1 for rate, band in zip(rates, bands, strict=True))


def test_shares_of_rounds_have_the_score_interval():
    """7 of 10 at 95 %: 0.397 to 0.892, a textbook example of Wilson's interval."""
    rounds = [1] * 7 + [0] * 3
    (band,) = rate_intervals(record(Counts.of_rounds(rounds, 1), is_by_request=False))
    assert (band.low, band.high) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert acceptance(rounds, 1, 2).accepted_by_position == (0.7,)


def test_a_ratio_of_sums_is_resampled_in_pairs():
    low, high = bootstrap_ratio(np.array([2, 4, 6, 8]), np.array([1, 2, 3, 4]))
    assert low == high == 2.0
