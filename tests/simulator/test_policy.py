"""Policies on equal traces: their choices, and their gain where no single setting is best."""

from dataclasses import dataclass

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


def test_off_switch_turns_at_its_limit():
    switch = OffSwitch(8, on=2, off=0)
    assert [switch.choose(np.ones(size)) for size in (1, 8, 9)] == [2, 2, 0]
    assert OffSwitch(0, on=2, off=0).choose(np.ones(1)) == 0


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


@dataclass(frozen=True)
class Fixed:
    """A round without drafts takes a second; a round with drafts takes the given time."""

    drafting: float

    def round(self, contexts, config) -> float:
        return 1.0 if config.is_plain else self.drafting


def test_goodput_forgets_a_tenth_as_fast_while_it_does_not_draft():
    """After rounds that accepted nothing the rate is 0; n plain rounds bring it back to 0.7 (1 - 0.9^n)."""
    policy = Goodput(Fixed(1.35), [Option.plain(), chain(1)], weight=1.0)
    policy.observe(1, np.zeros(4, int), 1.0)
    chosen = []
    for _ in range(8):
        chosen.append(policy.choose(np.ones(4)))
        policy.observe(0, np.zeros(4, int), 1.0)
    assert chosen == [0] * 7 + [1]  # 0.7 (1 - 0.9^6) < 0.35 < 0.7 (1 - 0.9^7)


def test_goodput_learns_by_its_weight():
    """Rejected rounds reduce the rate to 0.7 · 0.75^n. Drafting at 1.3 s stops below 0.3, after the third round."""
    policy = Goodput(Fixed(1.3), [Option.plain(), chain(1)], weight=0.25)
    chosen = []
    for _ in range(4):
        chosen.append(policy.choose(np.ones(4)))
        policy.observe(1, np.zeros(4, int), 1.0)
    assert chosen == [1, 1, 1, 0]


def test_goodput_extrapolates_to_drafts_that_it_has_not_seen():
    """Six and then three of 8 rounds accept. The expected number for the third draft is 3 · 3/6."""
    options = [Option.plain(), chain(2), chain(3)]
    accepted = np.array([2, 2, 2, 1, 1, 1, 0, 0])

    @dataclass(frozen=True)
    class Steps:
        third: float

        def round(self, contexts, config) -> float:
            return {0: 10.0, 2: 1.0, 3: self.third}[config.num_steps]

    expected = 1 + 6 / 8 + 3 / 8
    for third, choice in ((1 + 1.5 / 8 / expected - 1e-6, 2), (1 + 1.5 / 8 / expected + 1e-6, 1)):
        policy = Goodput(Steps(third), options, weight=1.0)
        policy.observe(1, accepted, 1.0)
        assert policy.choose(np.ones(4)) == choice


def test_moving_average_takes_the_chain_that_just_suffices():
    """The average starts at half the middle chain, 1.5. With a margin of 1.5, the chain of 3 is sufficient."""
    assert MovingAverage(OPTIONS, margin=1.5).choose(np.ones(4)) == 2
    assert MovingAverage(OPTIONS, margin=1.5 + 1e-9).choose(np.ones(4)) == 3
    policy = MovingAverage(OPTIONS, weight=0.5)
    chosen = []
    for _ in range(4):  # averages 1.5, 0.75, 0.375, 0.1875 and a margin of 0.75
        chosen.append(policy.choose(np.ones(4)))
        policy.observe(2, np.zeros(4, int), 1.0)
    assert chosen == [2, 2, 2, 1]


def test_throughput_explores_in_turn_for_each_batch_size():
    policy, speed = Throughput(OPTIONS, weight=0.5, explore=10), [1.0, 4.0, 2.0, 0.5]
    chosen = []
    for _ in range(50):
        option = policy.choose(np.ones(4))
        policy.observe(option, np.zeros(4, int), 1 / speed[option])
        chosen.append(option)
    assert {at: chosen[at] for at in (10, 20, 30, 40)} == {10: 1, 20: 2, 30: 3, 40: 0}
    assert set(chosen[4:10] + chosen[11:20]) == {1}
    assert policy.choose(np.ones(7)) == 1
    assert policy.choose(np.ones(8)) == policy.choose(np.ones(3)) == 0  # no samples for other sizes
    assert policy.choose(np.ones(4)) == 1
    for best in (1, 2):  # 16 tokens a second become 10, then 7, and the next best makes 8
        policy.observe(1, np.zeros(4, int), 1.0)
        assert policy.choose(np.ones(4)) == best


def test_choosing_pays_where_acceptance_changes():
    """On texts with a predictable beginning, goodput is better than every constant setting."""
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
        (lambda: OffSwitch(-1), "limit", -1),
        (lambda: Throughput(OPTIONS, explore=1), "explore", 1),
    ],
)
def test_impossible_policies_are_refused(make, name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        make()
