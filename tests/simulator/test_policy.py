"""Policies on equal traces: what each chooses, and that choosing pays where no one setting is best."""

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.acceptance import Callback, PerPosition, Recorded, iid
from specsim.simulator.option import Option
from specsim.simulator.policy import Goodput, MovingAverage, OffSwitch, Throughput, compare
from specsim.simulator.timeline import simulate
from specsim.simulator.workload import closed_loop

LLAMA = model("llama-3-8b")
COST = CostModel(hardware("RTX-4090"), LLAMA, drafter("eagle3", LLAMA, 32000))
RATES = iid(0.75, 5)


def chain(steps: int, acceptance=RATES) -> Option:
    return Option(SpecConfig(1, steps, steps + 1), acceptance) if steps else Option.plain()


OPTIONS = [chain(steps) for steps in (0, 1, 3, 5)]


def test_traces_are_equal():
    """A request's round at some position accepts under a short chain what it accepts under a longer one, cut."""
    seen = {}

    def accepted(rounds):
        drawn = RATES.accepted(rounds)
        for request, position, count in zip(rounds.request_ids, rounds.positions, drawn, strict=True):
            assert seen.setdefault((request, position), count) == count
        return drawn

    for steps in (1, 3, 5):
        simulate(COST, chain(steps, Callback(accepted, 5)), closed_loop(10, 4, 20, 60), seed=3)
    assert len(seen) > 300


def test_off_switch_turns_at_its_limit():
    switch = OffSwitch(8, on=2, off=0)
    assert [switch.choose(np.ones(size)) for size in (1, 8, 9)] == [2, 2, 0]


def test_moving_average_follows_acceptance():
    policy = MovingAverage(OPTIONS, weight=0.5)
    for _ in range(20):
        policy.observe(1, np.zeros(4, int), 1.0)
    assert policy.choose(np.ones(4)) == 1
    for _ in range(20):
        policy.observe(1, np.ones(4, int), 1.0)
    assert policy.choose(np.ones(4)) == 2
    for _ in range(20):
        policy.observe(2, np.full(4, 3), 1.0)
    assert policy.choose(np.ones(4)) == 3


def test_throughput_tries_all_and_keeps_the_best():
    policy, speed = Throughput(OPTIONS, explore=10), [1.0, 4.0, 2.0, 0.5]
    chosen = []
    for _ in range(200):
        option = policy.choose(np.ones(4))
        policy.observe(option, np.zeros(4, int), 1 / speed[option])
        chosen.append(option)
    assert chosen[:4] == [0, 1, 2, 3]
    assert chosen.count(1) > 150
    assert set(chosen[100:]) == {0, 1, 2, 3}
    assert policy.choose(np.ones(100)) == 0  # a size it knows nothing of


def test_goodput_knows_when_drafts_do_not_pay():
    policy = Goodput(COST, OPTIONS)
    few, many = np.full(1, 500), np.full(400, 50)
    for _ in range(300):
        policy.observe(3, np.full(8, 5), 1.0)
    assert policy.choose(few) == 3
    for _ in range(300):
        policy.observe(3, np.zeros(8, int), 1.0)
    assert policy.choose(few) == policy.choose(many) == 0
    for _ in range(300):
        policy.observe(1, np.ones(8, int), 1.0)
    assert policy.choose(few) == 3  # one draft always accepted promises the next


def test_choosing_pays_where_acceptance_changes():
    """Texts that begin predictably and go on otherwise: goodput beats every setting that stays."""
    counts = np.concatenate([np.full(240, 5), np.zeros(240, int)])
    options = [chain(steps, Recorded((counts,), 5, by="position")) for steps in (0, 1, 3, 5)]
    serving = ServingConfig("overlap", 4, 10**5)
    runs = compare(COST, options, closed_loop(4, 4, 50, 480), serving, limit=4)
    static = [runs.pop(name).duration for name in ("no drafts", "1 draft", "3 drafts", "5 drafts")]
    assert list(runs) == ["off above 4", "moving average", "throughput", "goodput"]
    assert runs["goodput"].duration < 0.98 * min(static)
    assert runs["off above 4"].duration == static[-1]


def test_goodput_is_near_the_best_setting_at_every_load():
    for concurrency in (1, 64, 400):
        load = closed_loop(2 * concurrency + 4, concurrency, 60, 60)
        runs = compare(COST, OPTIONS, load, ServingConfig("overlap", 400, 10**6))
        static = [runs[name].duration for name in ("no drafts", "1 draft", "3 drafts", "5 drafts")]
        assert runs["goodput"].duration < 1.04 * min(static)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: MovingAverage([Option(SpecConfig(2, 2, 4), PerPosition((0.5, 0.2)))]), "options", "a tree"),
        (lambda: Goodput(COST, [Option.plain()]), "options", "1 settings"),
        (lambda: compare(COST, [chain(1)], closed_loop(1, 1, 1, 1)), "options", "1 chains"),
        (lambda: OffSwitch(0), "limit", 0),
        (lambda: Throughput(OPTIONS, explore=1), "explore", 1),
    ],
)
def test_impossible_policies_are_refused(make, name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        make()
