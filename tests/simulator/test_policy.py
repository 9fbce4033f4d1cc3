"""Policies on equal traces: their choices, and their gain where no single setting is best."""

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.core.policies.goodput import Goodput
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.acceptance import Callback, Option, PerPosition, RecordedAcceptance, iid
from specsim.simulator.policy_comparison import compare_policies
from specsim.simulator.server import simulate
from specsim.simulator.workload import closed_loop

LLAMA = model("llama-3-8b")
COST = CostModel(hardware("RTX-4090"), LLAMA, drafter("eagle3", LLAMA, 32000))
RATES = iid(0.75, 5)


def chain(steps: int, acceptance=RATES) -> Option:
    return Option(SpecConfig(1, steps, steps + 1), acceptance) if steps else Option.plain()


OPTIONS = [chain(steps) for steps in (0, 1, 3, 5)]
TREES = [Option.plain(), Option(SpecConfig(2, 2, 4), PerPosition((0.5, 0.2)))]


def test_traces_are_equal():
    """At the same position, a short chain accepts the drafts of a longer chain, up to its own length."""
    seen = {}

    def accepted(rounds):
        drawn = RATES.accepted(rounds)
        for request, position, count in zip(rounds.request_ids, rounds.positions, drawn, strict=True):
            assert seen.setdefault((request, position), count) == count
        return drawn

    for steps in (1, 3, 5):
        simulate(COST, chain(steps, Callback(accepted, 5)), closed_loop(10, 4, 20, 60), seed=3)
    assert len(seen) > 300


def test_goodput_knows_when_drafts_do_not_pay():
    policy = Goodput(COST, [option.config for option in OPTIONS])
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
    """On texts with a predictable beginning, goodput is better than every constant setting."""
    counts = np.concatenate([np.full(240, 5), np.zeros(240, int)])
    options = [chain(steps, RecordedAcceptance((counts,), 5, by="position")) for steps in (0, 1, 3, 5)]
    serving = ServingConfig("overlap", 4, 10**5)
    runs = compare_policies(COST, options, closed_loop(4, 4, 50, 480), serving, limit=4)
    static = [runs.pop(name).duration for name in ("no drafts", "1 draft", "3 drafts", "5 drafts")]
    assert list(runs) == ["off above 4", "moving average", "throughput", "goodput"]
    assert runs["goodput"].duration < 0.98 * min(static)
    assert runs["off above 4"].duration == static[-1]


def test_goodput_is_near_the_best_setting_at_every_load():
    for concurrency in (1, 64, 400):
        load = closed_loop(2 * concurrency + 4, concurrency, 60, 60)
        runs = compare_policies(COST, OPTIONS, load, ServingConfig("overlap", 400, 10**6))
        static = [runs[name].duration for name in ("no drafts", "1 draft", "3 drafts", "5 drafts")]
        assert runs["goodput"].duration < 1.04 * min(static)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: compare_policies(COST, TREES, closed_loop(1, 1, 1, 1)), "options", "a tree"),
        (lambda: compare_policies(COST, [chain(1)], closed_loop(1, 1, 1, 1)), "options", "1 chains"),
    ],
)
def test_impossible_policies_are_refused(make, name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        make()
