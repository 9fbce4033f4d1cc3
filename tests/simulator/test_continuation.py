"""Rates continue by the smoothed rule, which is the best on published series, with intervals that hold."""

from itertools import pairwise

import numpy as np
import pytest

from papers.inferencex.reproduce import RULES, constant, coverage
from specsim.core.errors import InputError
from specsim.simulator.continuation import (
    CONFIDENCE,
    continued,
    length_interval,
    lengths_in_order,
    margin,
    misses,
    published_series,
    rates_of_lengths,
    smoothed,
)

LENGTHS = (1.8, 2.4, 2.8)


def errors(rule, role: str) -> np.ndarray:
    chosen = [each for each in published_series() if each.role == role]
    return np.abs([miss.error for each in chosen for miss in misses(each, rule, least_given=2)])


def test_gains_in_accept_length_are_rates_by_position():
    assert rates_of_lengths(lengths_in_order(LENGTHS)) == pytest.approx((0.8, 0.6, 0.4))


def test_steps_between_two_lengths_share_a_conditional_rate():
    rates = rates_of_lengths({2: 1.75, 3: 1.85})
    assert rates == pytest.approx((0.5, 0.25, 0.1))
    assert 1 + sum(rates_of_lengths({4: 3.0})) == pytest.approx(3.0)


def test_gains_that_rise_are_made_monotone():
    rates = rates_of_lengths(dict(enumerate((1.5, 1.8, 2.2), start=1)))
    assert rates == pytest.approx((0.5, 0.35, 0.35))
    assert all(rate > 0 for rate in rates_of_lengths({1: 1.5, 2: 1.4}))


@pytest.mark.parametrize("rule", RULES.values())
def test_equal_conditional_rates_stay_equal(rule):
    rates = tuple(0.7**step for step in range(1, 4))
    assert continued(rates, 8, rule) == pytest.approx([0.7**step for step in range(1, 9)])


def test_a_trend_goes_on_with_less_slope():
    falling = continued((0.8, 0.56, 0.28), 5)
    conditional = [after / before for before, after in pairwise(falling)]
    assert conditional[2] < 0.56  # below the mean of the given ones
    assert conditional[3] < conditional[2]
    steeper = continued((0.8, 0.56, 0.28), 5, RULES["unshrunk line"])
    assert falling[4] > steeper[4]


def test_fewer_steps_and_no_acceptance_need_no_rule():
    assert continued((0.8, 0.6), 1) == (0.8,)
    assert continued((0.5, 0.0), 4) == (0.5, 0.0, 0.0, 0.0)
    assert continued((), 3) == ()


@pytest.mark.parametrize("lengths", [(), (0.9,), (1.5, 3.2), (2.0, 1.5), (float("nan"),)])
def test_lengths_that_no_chain_has_are_refused(lengths):
    with pytest.raises(InputError, check=lambda error: error.name == "accept_lengths"):
        lengths_in_order(lengths)


def test_the_smoothed_rule_is_best_on_the_series_that_chose_it():
    mean = {name: errors(rule, "chosen on").mean() for name, rule in RULES.items()}
    assert min(mean, key=mean.__getitem__) == "smoothed"
    assert mean["smoothed"] < 0.026
    assert errors(smoothed, "chosen on").max() < 0.17


def test_the_smoothed_rule_is_best_on_held_out_series():
    mean = {name: errors(rule, "held out").mean() for name, rule in RULES.items()}
    assert min(mean, key=mean.__getitem__) == "smoothed"
    assert mean["smoothed"] < 0.05 < errors(constant, "held out").mean()


def test_every_series_is_published_in_order():
    assert len({str(series) for series in published_series()}) == len(published_series()) == 16
    for series in published_series():
        assert all(1 < length <= steps + 1 for steps, length in series.lengths.items())
        assert series.role in ("chosen on", "held out")


def test_intervals_hold_the_lengths_of_other_series():
    assert CONFIDENCE - 0.05 < coverage() < CONFIDENCE + 0.05


def test_margins_grow_with_the_steps_ahead():
    for given in (1, 2, 3):
        margins = [margin(given, ahead) for ahead in range(1, 6)]
        assert margins == sorted(margins)
        assert margins[0] > 0
    assert margin(9, 2) == margin(3, 2)


def test_an_interval_holds_what_any_longer_chain_could_have():
    rates = (0.8, 0.6, 0.4)
    band = length_interval(rates, 6)
    assert 2.8 <= band.low < 1 + sum(continued(rates, 6)) < band.high <= 2.8 + 3 * 0.4
    lows = [length_interval(rates, steps).low for steps in range(3, 9)]
    assert lows == sorted(lows)
    assert length_interval(rates, 3).low == length_interval(rates, 3).high == pytest.approx(2.8)
