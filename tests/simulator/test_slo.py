"""Service-level objectives: goodput of a run, and the highest rate within them."""

import math

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator.cell import Cell
from specsim.simulator.results import ATTAINMENT, GOODPUT
from specsim.simulator.slo import PRECISION, RateGoal, Slo, best_rate, highest_rate, is_within

CELL = Cell(requests=60, rate=5.0, prompt_tokens=(200, 600), output_tokens=(20, 60), max_running=64)
RUN = CELL.run()
PLAIN, CHAIN = (CELL.option(CELL.with_values(num_steps=steps).config) for steps in (0, 3))
GOAL = RateGoal(Slo(ttft=0.1, tpot=0.012), 0.9, 2)


def test_bounds_are_read_with_their_units():
    assert Slo.parse("ttft=200ms,tpot=20ms") == Slo(ttft=0.2, tpot=0.02)
    assert Slo.parse("e2e=5s") == Slo.parse("e2el=5000ms") == Slo(e2e=5.0)
    assert str(Slo.parse("ttft=0.2s, e2e=5s")) == "TTFT ≤ 200 ms, E2E ≤ 5000 ms"


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=0ms", "itl=5ms", "ttft=1s,ttft=2s", "ttft=infs", "e2e=-1s"]
)
def test_other_bounds_are_refused(text):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("slo", text)):
        Slo.parse(text)


def test_goodput_counts_requests_within_all_bounds():
    ttft, tpot = np.median(RUN.ttft), np.median(RUN.tpot)
    good = sum(one <= ttft and two <= tpot for one, two in zip(RUN.ttft, RUN.tpot, strict=True))
    assert 0 < good < len(RUN.arrivals)
    metrics = Slo(ttft=ttft, tpot=tpot).metrics(RUN)
    assert metrics[GOODPUT] == pytest.approx(good / RUN.duration)
    assert metrics[ATTAINMENT] == pytest.approx(100 * good / len(RUN.arrivals))
    assert metrics["Mean TTFT (ms)"] == RUN.metrics()["Mean TTFT (ms)"]
    assert Slo(e2e=1e9).metrics(RUN)[GOODPUT] == pytest.approx(metrics["Request Throughput (req/s)"])


def test_a_request_of_one_token_has_no_tpot_to_exceed():
    run = CELL.with_values(output_tokens=1).run()
    assert np.isnan(run.tpot).all()
    assert Slo(tpot=1e-6).within(run).all()


def test_the_highest_rate_is_within_and_the_next_is_not():
    for option in (PLAIN, CHAIN):
        rate = highest_rate(CELL, option, GOAL)
        assert rate == highest_rate(CELL, option, GOAL)
        assert is_within(CELL, option, GOAL, rate)
        assert not is_within(CELL, option, GOAL, rate * PRECISION)


@pytest.mark.parametrize("start", [0.3, 1.0, 40.0, 1e4])
def test_from_any_start_a_rate_above_the_bounds_is_near(start, monkeypatch):
    tried = {}

    def noted(cell, option, goal, rate):
        return tried.setdefault(rate, is_within(cell, option, goal, rate))

    monkeypatch.setattr("specsim.simulator.slo.is_within", noted)
    rate = highest_rate(CELL, CHAIN, GOAL, start)
    assert tried[rate]
    assert any(not within and rate < other <= rate * PRECISION for other, within in tried.items())


def test_a_share_of_late_requests_is_allowed():
    scenario = CELL.with_values(rate=35.0).serving(CHAIN)
    good = Slo(ttft=0.05).within(scenario.run(CHAIN)).mean()
    assert 0.2 < good < 0.95
    for share, expected in ((good, True), (good + 1 / 60, False), (good - 0.1, True)):
        assert is_within(CELL, CHAIN, RateGoal(Slo(ttft=0.05), share), 35.0) is expected


def test_looser_objectives_allow_higher_rates():
    rates = [highest_rate(CELL, CHAIN, RateGoal(Slo(ttft=bound), 0.9)) for bound in (0.03, 0.1, 0.3)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert highest_rate(CELL, CHAIN, RateGoal(Slo(ttft=1e-6))) == 0
    assert highest_rate(CELL, CHAIN, RateGoal(Slo(ttft=100.0))) == math.inf


def test_the_best_setting_has_the_highest_rate():
    options = [CELL.option(CELL.with_values(num_steps=steps).config) for steps in (0, 1, 3, 5)]
    goal = RateGoal(Slo(ttft=0.1, tpot=0.012), 0.9, 4)
    done = []
    found = best_rate(CELL, options, goal, lambda: done.append(1))
    rates = {option.config: highest_rate(CELL, option, goal) for option in options}
    assert found is not None
    assert found.rate >= max(rates.values()) / PRECISION
    assert rates[found.config] >= max(rates.values()) / PRECISION
    assert len(done) == 4
    assert best_rate(CELL, options, RateGoal(Slo(ttft=1e-6))) is None


def test_a_share_outside_0_to_1_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("share", 99)):
        RateGoal(Slo(ttft=1), 99)
