"""Policies by hand: every rule against choices that follow from its definition."""

from dataclasses import dataclass

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.core.policies.by_batch_size import BatchTable, OffSwitch
from specsim.core.policies.goodput import CostTable, Goodput
from specsim.core.policies.moving_average import AverageRule, MovingAverage
from specsim.core.policies.per_request import MOST_REQUESTS, ByRequest, RequestAverages, RequestGoodput, RequestScript
from specsim.core.policies.policy import Scripted
from specsim.core.policies.throughput import Throughput


def chain(steps: int) -> SpecConfig:
    return SpecConfig(1, steps, steps + 1) if steps else SpecConfig.plain()


CHAINS = [chain(steps) for steps in (0, 1, 3, 5)]


def test_off_switch_turns_at_its_limit():
    switch = OffSwitch(8, on=2, off=0)
    assert [switch.choose(np.ones(size)) for size in (1, 8, 9)] == [2, 2, 0]
    assert OffSwitch(0, on=2, off=0).choose(np.ones(1)) == 0


def test_throughput_tries_all_and_keeps_the_best():
    policy, speed = Throughput(CHAINS, explore=10), [1.0, 4.0, 2.0, 0.5]
    chosen = []
    for _ in range(200):
        option = policy.choose(np.ones(4))
        policy.observe(option, np.zeros(4, int), 1 / speed[option])
        chosen.append(option)
    assert chosen[:4] == [0, 1, 2, 3]
    assert chosen.count(1) > 150
    assert set(chosen[100:]) == {0, 1, 2, 3}
    assert policy.choose(np.ones(100)) == 0  # a size it knows nothing of


@dataclass(frozen=True)
class Fixed:
    """A round without drafts takes a second; a round with drafts takes the given time."""

    drafting: float

    def round(self, contexts, config) -> float:
        return 1.0 if config.is_plain else self.drafting


def test_goodput_forgets_a_tenth_as_fast_while_it_does_not_draft():
    """After rounds that accepted nothing the rate is 0; n plain rounds bring it back to 0.7 (1 - 0.9^n)."""
    policy = Goodput(Fixed(1.35), [chain(0), chain(1)], weight=1.0)
    policy.observe(1, np.zeros(4, int), 1.0)
    chosen = []
    for _ in range(8):
        chosen.append(policy.choose(np.ones(4)))
        policy.observe(0, np.zeros(4, int), 1.0)
    assert chosen == [0] * 7 + [1]  # 0.7 (1 - 0.9^6) < 0.35 < 0.7 (1 - 0.9^7)


def test_goodput_learns_by_its_weight():
    """Rejected rounds reduce the rate to 0.7 · 0.75^n. Drafting at 1.3 s stops below 0.3, after the third round."""
    policy = Goodput(Fixed(1.3), [chain(0), chain(1)], weight=0.25)
    chosen = []
    for _ in range(4):
        chosen.append(policy.choose(np.ones(1)))
        policy.observe(1, np.zeros(1, int), 1.0)
    assert chosen == [1, 1, 1, 0]


@pytest.mark.parametrize(("size", "choice"), [(2, 1), (3, 0)])
def test_a_round_of_a_batch_counts_as_rounds_of_its_requests(size, choice):
    """0.7 · 0.75² is above 0.3, 0.7 · 0.75³ is below."""
    policy = Goodput(Fixed(1.3), [chain(0), chain(1)], weight=0.25)
    policy.observe(1, np.zeros(size, int), 1.0)
    assert policy.choose(np.ones(size)) == choice


def test_goodput_extrapolates_to_drafts_that_it_has_not_seen():
    """Six and then three of 8 rounds accept. The expected number for the third draft is 3 · 3/6."""
    options = [chain(0), chain(2), chain(3)]
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


def test_throughput_explores_in_turn_for_each_batch_size():
    policy, speed = Throughput(CHAINS, weight=0.5, explore=10), [1.0, 4.0, 2.0, 0.5]
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


def chosen_by(policy, accepted: list[int], settings=CHAINS, size: int = 4) -> list[int]:
    """Number of steps of every round, whose requests all accept as many drafts as they can."""
    steps = []
    for count in accepted:
        number = policy.choose(np.ones(size))
        steps.append(settings[number].num_steps)
        policy.observe(number, np.full(size, min(count, steps[-1])), 1.0)
    return steps


def test_average_falls_and_rises_every_fifth_round():
    """The average starts at 4; rounds without a draft make it 4 · 0.8^n, and below 0.25 drafting is off."""
    rule = {1: AverageRule((0, 1, 3, 5))}
    chosen = chosen_by(MovingAverage(CHAINS, rule), [0] * 15)
    assert chosen == [5] * 15  # ten rounds to warm up, five to the first decision
    chosen = chosen_by(MovingAverage(CHAINS, rule), [0] * 16 + [9] * 30)
    assert chosen[15] == 0  # 4 · 0.8^15 is 0.14, at most 0.5 - 0.25
    assert chosen[15:20] == [0] * 5
    assert chosen[20:25] == [1] * 5  # nothing is measured at 0 steps: the next are tried
    assert chosen[25:30] == [3] * 5  # 1 - 0.86 · 0.8^5 is 0.72, above 1 - 0.5
    assert chosen[30:35] == [3] * 5  # 3 - 2.28 · 0.8^5 is 2.25, not above 3 - 0.5
    assert chosen[35:40] == [5] * 5  # 3 - 0.75 · 0.8^5 is 2.75


def test_hysteresis_holds_the_longer_chain():
    """An average of 2.4 lies between 3 - 0.5 - 0.25 and 3 - 0.5: five steps stay, three do not rise."""
    settings = [chain(3), chain(5)]
    for first, kept in ((3, 3), (5, 5)):
        policy = MovingAverage(settings, first=first)
        for _ in range(100):
            number = policy.choose(np.ones(5))
            policy.observe(number, np.array([2, 2, 2, 3, 3]), 1.0)
        assert settings[policy.choose(np.ones(5))].num_steps == kept


def test_averages_of_batch_sizes_are_apart():
    rules = {1: AverageRule((1, 3, 5)), 8: AverageRule((0, 1))}
    policy = MovingAverage(CHAINS, rules)
    assert chosen_by(policy, [9] * 20, size=8)[-1] == 1
    assert chosen_by(policy, [0] * 16, size=7)[-1] == 1
    assert chosen_by(policy, [9], size=8) == [1]


def test_a_ceiling_lowers_steps_that_do_not_rise():
    """An average of 1.4 is above 2 - 0.5 - 0.25, where three steps would stay; the coefficient allows 2."""
    settings = [chain(2), chain(3), chain(5)]
    for coefficient, steps in ((0.0, 3), (1.0, 2)):
        policy = MovingAverage(settings, {1: AverageRule((2, 3, 5), ceiling_coeff=coefficient)})
        for _ in range(60):
            policy.observe(2, np.array([1, 2, 1, 1, 2]), 1.0)
        assert settings[policy.choose(np.ones(2))].num_steps == steps


@pytest.mark.parametrize(("size", "steps"), [(1, 5), (4, 5), (6, 5), (8, 1), (16, 1), (17, 0), (900, 0)])
def test_a_table_covers_gaps_with_the_entry_before(size, steps):
    table = BatchTable(CHAINS, [[1, 4, 5], [8, 16, 1], [17, 32, 0]])
    assert CHAINS[table.choose(np.ones(size))].num_steps == steps


def test_a_script_repeats():
    policy = Scripted([2, 0, 1])
    assert [policy.choose(np.ones(1)) for _ in range(5)] == [2, 0, 1, 2, 0]


def test_a_cost_table_grows_between_its_sizes():
    cost = CostTable([1, 5], {0: [1.0, 2.0], 3: [2.0, 1.0]})
    assert [cost.round(np.ones(size), chain(0)) for size in (1, 3, 5, 9)] == [1.0, 1.5, 2.0, 3.0]
    assert [cost.round(np.ones(size), chain(3)) for size in (3, 9)] == [1.5, 1.0]  # never cheaper beyond
    with pytest.raises(InputError, match="num_steps 5"):
        cost.round(np.ones(1), chain(5))


def test_goodput_of_numbers_turns_off_in_large_batches():
    cost = CostTable([1, 64], {0: [1.0, 1.2], 1: [1.1, 2.4], 3: [1.2, 4.0], 5: [1.3, 6.0]})
    policy = Goodput(cost, CHAINS)
    assert [CHAINS[policy.choose(np.ones(size))].num_steps for size in (1, 64)] == [5, 0]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MovingAverage([chain(1), SpecConfig(2, 1, 3)]), "settings"),
        (lambda: MovingAverage(CHAINS, {1: AverageRule((2,))}), "num_steps"),
        (lambda: MovingAverage(CHAINS, {2: AverageRule((1,))}), "rules"),
        (lambda: AverageRule((1,), ema_alpha=2.0), "ema_alpha"),
        (lambda: AverageRule(()), "candidate_steps"),
        (lambda: Goodput(CostTable([1], {0: [1.0]}), [chain(0)]), "settings"),
        (lambda: Goodput(CostTable([1], {0: [1.0]}), [chain(1), SpecConfig(2, 2, 4)]), "topk"),
        (lambda: CostTable([1, 1], {0: [1.0, 1.0]}), "batch_sizes"),
        (lambda: CostTable([1], {0: [0.0]}), "seconds"),
        (lambda: BatchTable(CHAINS, [[2, 4, 1]]), "num_speculative_tokens_per_batch_size"),
        (lambda: BatchTable(CHAINS, [[1, 4, 1], [4, 5, 0]]), "num_speculative_tokens_per_batch_size"),
        (lambda: BatchTable(CHAINS, [[1, 4, 2]]), "num_steps"),
        (lambda: Scripted([]), "choices"),
        (lambda: OffSwitch(-1), "limit"),
        (lambda: Throughput(CHAINS, explore=1), "explore"),
    ],
)
def test_impossible_policies_name_the_field(make, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        make()


IDS = np.array([7, 3])
LENGTHS = np.array([10, 20])


def test_a_script_per_request_starts_at_the_request_id():
    policy = RequestScript(CHAINS, [0, 3, 1])
    found = [policy.choose_requests(np.array([0, 1, 2]), np.ones(3)) for _ in range(3)]
    assert [choice.steps.tolist() for choice in found] == [[0, 3, 1], [3, 1, 0], [1, 0, 3]]
    assert [CHAINS[choice.setting].num_steps for choice in found] == [3, 3, 3]


def test_a_request_that_skips_a_round_keeps_its_place():
    policy = RequestScript(CHAINS, [0, 3, 1])
    assert policy.choose_requests(np.array([0, 1]), np.ones(2)).steps.tolist() == [0, 3]
    assert policy.choose_requests(np.array([1]), np.ones(1)).steps.tolist() == [1]
    assert policy.choose_requests(np.array([1, 0]), np.ones(2)).steps.tolist() == [0, 3]


def test_pairs_of_a_script_name_the_settings_steps_too():
    policy = RequestScript(CHAINS, [[5, 2], [1, 0]])
    choice = policy.choose_requests(np.array([0, 1]), np.ones(2))
    assert (CHAINS[choice.setting].num_steps, choice.steps.tolist()) == (5, [2, 0])
    assert CHAINS[policy.choose_requests(np.array([0]), np.ones(1)).setting].num_steps == 1


def test_a_round_takes_the_fewest_steps_that_all_requests_have():
    policy = RequestScript(CHAINS, [2, 0])
    assert CHAINS[policy.choose_requests(np.array([0]), np.ones(1)).setting].num_steps == 3
    assert CHAINS[policy.choose_requests(np.array([1]), np.ones(1)).setting].num_steps == 0


def test_averages_per_request_are_those_of_each_request_alone():
    """Request 7 accepts all drafts and request 3 none; each chooses as a batch of it alone would."""
    rule = {1: AverageRule((0, 1, 3, 5), update_interval=1, warmup_batches=0, ema_alpha=0.5)}
    policy = RequestAverages(CHAINS, rule, first=3)
    alone = {request: MovingAverage(CHAINS, rule, first=3) for request in (7, 3)}
    chosen = []
    for _ in range(12):
        choice = policy.choose_requests(IDS, LENGTHS)
        expected = [CHAINS[alone[request].choose(np.ones(1))].num_steps for request in (7, 3)]
        assert choice.steps.tolist() == expected
        assert CHAINS[choice.setting].num_steps == max(expected)
        accepted = choice.steps * np.array([1, 0])
        policy.observe_requests(IDS, choice, accepted, 1.0)
        for place, request in enumerate((7, 3)):
            number = [config.num_steps for config in CHAINS].index(choice.steps[place])
            alone[request].observe(number, accepted[place : place + 1], 1.0)
        chosen.append(choice.steps.tolist())
    assert [5, 0] in chosen  # drafts of one request while the other has none


def test_averages_per_request_survive_a_new_order_of_the_batch():
    rule = {1: AverageRule((0, 1, 3), update_interval=1, warmup_batches=0, ema_alpha=1.0)}
    policy = RequestAverages(CHAINS[:3], rule, first=3)
    policy.observe_requests(IDS, policy.choose_requests(IDS, LENGTHS), np.array([3, 0]), 1.0)
    assert policy.choose_requests(IDS, LENGTHS).steps.tolist() == [3, 0]
    assert policy.choose_requests(IDS[::-1], LENGTHS).steps.tolist() == [0, 3]
    assert policy.choose_requests(np.array([4, 7]), LENGTHS).steps.tolist() == [3, 3]


@dataclass(frozen=True)
class PerRow:
    """A round takes a second, and a tenth more for each draft row of a request."""

    def round(self, contexts, config) -> float:
        return 1.0 + 0.1 * config.num_steps * len(contexts)


def test_goodput_per_request_drafts_where_a_row_pays():
    """One request accepts all drafts, the other none.

    With all of 5 drafts the first gets 7 tokens of both in 1.5 s if dead rows are saved, 4.67 a second; the other's
    drafts would cost 0.5 s more and bring nothing.
    """
    policy = RequestGoodput(PerRow(), CHAINS, weight=1.0, row_seconds=0.1)
    choice = policy.choose_requests(IDS, LENGTHS)
    policy.observe_requests(IDS, choice._replace(steps=np.array([5, 5])), np.array([5, 0]), 1.0)
    choice = policy.choose_requests(IDS, LENGTHS)
    assert choice.steps.tolist() == [5, 0]
    assert CHAINS[choice.setting].num_steps == 5


def test_goodput_per_request_is_the_best_of_all_steps():
    generator = np.random.default_rng(3)
    for _ in range(40):
        policy = RequestGoodput(PerRow(), CHAINS, weight=0.7, row_seconds=float(generator.uniform(0, 0.1)))
        for _ in range(3):
            steps = np.array([5, 5])
            policy.observe_requests(
                IDS, policy.choose_requests(IDS, LENGTHS)._replace(steps=steps), generator.integers(0, 6, 2), 1
            )
        choice = policy.choose_requests(IDS, LENGTHS)
        assert (
            tokens_a_second(policy, choice.setting, choice.steps)
            >= max(
                tokens_a_second(policy, number, np.array([first, second]))
                for number, config in enumerate(CHAINS)
                for first in range(config.num_steps + 1)
                for second in range(config.num_steps + 1)
            )
            - 1e-9
        )


def tokens_a_second(policy: RequestGoodput, number: int, steps: np.ndarray) -> float:
    """Compute the expected tokens a second by definition, where a dead row saves the policy's seconds."""
    expected = [policy._rates.of(request).expected[count] for request, count in zip(IDS.tolist(), steps, strict=True)]
    dead = 2 * CHAINS[number].num_steps - steps.sum()
    return sum(expected) / max(PerRow().round(LENGTHS, CHAINS[number]) - policy._row_seconds * dead, 1.0)


def test_without_saved_rows_all_requests_draft_as_the_setting():
    policy = RequestGoodput(PerRow(), CHAINS)
    choice = policy.choose_requests(IDS, LENGTHS)
    assert set(choice.steps.tolist()) == {CHAINS[choice.setting].num_steps}


def test_settings_of_a_policy_per_request_have_one_topk():
    tree = SpecConfig(2, 2, 5)
    with pytest.raises(InputError, check=lambda error: error.name == "topk"):
        RequestAverages([chain(0), chain(1), tree])


def test_only_the_latest_requests_are_remembered():
    made = iter(range(10**6))
    known = ByRequest(lambda: next(made))
    assert [known.of(request) for request in (5, 6, 5)] == [0, 1, 0]
    for request in range(100, 99 + MOST_REQUESTS):
        known.of(request)
    assert known.of(5) == 0
    assert known.of(6) == MOST_REQUESTS + 1
