"""Plans: the best candidate, the cost of the others, and flags for engines."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.cli.plan import SHOWN, show_candidates
from specsim.core.display import stdout_console
from specsim.core.errors import InputError
from specsim.simulator.acceptance import Option, iid
from specsim.simulator.candidates import Replicated, candidates
from specsim.simulator.cell import Cell
from specsim.simulator.plan import OBJECTIVES, plan
from specsim.simulator.policy_comparison import policy_metrics
from specsim.simulator.schedule import SteadyBatch
from specsim.simulator.slo import Slo

SHARES = ((0.6, 0.15, 0.05), (0.55, 0.15, 0.05), (0.5, 0.15, 0.05))
CELL = Cell(requests=24, concurrency=8, prompt_tokens=100, output_tokens=60, shares=SHARES, max_running=128)


@cache
def planned(objective: str = "throughput"):
    return plan(CELL, objective, replicates=2)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_candidates_are_ranked_by_the_objective(objective):
    found = planned(objective)
    name = OBJECTIVES[objective]
    figures = np.array([each.metrics[name] for each in found.candidates])
    costs = 1 / figures if objective == "throughput" else figures
    assert {each.config for each in found.candidates} == set(candidates(CELL))
    assert [each.regret for each in found.candidates] == pytest.approx(costs / costs.min() - 1, abs=2e-3)
    losers = [each.regret for each in found.candidates if not each.is_equal]
    assert losers == sorted(losers)
    assert [each.is_equal for each in found.candidates] == sorted(each.is_equal for each in found.candidates)[::-1]
    assert found.over_plain(found.plain) == 1
    assert found.over_plain(found.best) == pytest.approx(costs[[*found.candidates].index(found.plain)] / costs[0])


def test_of_equal_settings_the_cheapest_is_best(monkeypatch):
    """Tree 2/3/8 is the fastest. A chain of 3 is within 1 %, and one of 2 within its spread. The others are slower."""
    regrets = {(1, 0): (0.5, 0.2), (1, 1): (0.03, 0.02), (1, 2): (0.02, 0.05), (1, 3): (0.01, 0.0), (2, 3): (0, 0)}

    def given(cell, options, *_):
        return [
            Replicated(
                option, {"Output Throughput (tok/s)": 1.0}, *regrets[option.config.topk, option.config.num_steps]
            )
            for option in options
        ]

    monkeypatch.setattr("specsim.simulator.plan.run_replicates", given)
    configs = [SpecConfig(1, steps, steps + 1) for steps in (3, 0, 2, 1)]
    found = plan(CELL, configs=[SpecConfig(2, 3, 8), *configs])
    order = [(each.config.topk, each.config.num_steps) for each in found.candidates]
    assert order == [(1, 2), (1, 3), (2, 3), (1, 1), (1, 0)]
    assert found.best_chain is found.best is found.candidates[0]


def test_the_best_chain_is_the_cheapest_of_equal_chains(monkeypatch):
    regrets = {(2, 3): 0, (1, 3): 0.10, (1, 2): 0.109, (1, 1): 0.12, (1, 0): 0.2}

    def given(cell, options, *_):
        return [
            Replicated(
                option, {"Output Throughput (tok/s)": 1.0}, regrets[option.config.topk, option.config.num_steps], 0
            )
            for option in options
        ]

    monkeypatch.setattr("specsim.simulator.plan.run_replicates", given)
    chains = [SpecConfig(1, steps, steps + 1) for steps in range(4)]
    assert plan(CELL, configs=[SpecConfig(2, 3, 8), *chains]).best_chain.config.num_steps == 2


@pytest.mark.parametrize(("count", "rest"), [(SHOWN, None), (SHOWN + 1, "and 1 more, none of them better.")])
def test_candidates_that_are_not_shown_are_counted(count, rest, capsys):
    show_candidates(replace(planned(), candidates=(planned().best,) * count), stdout_console())
    out = capsys.readouterr().out
    assert ("none of them better" in out) == (rest is not None)
    assert rest is None or rest in out


def test_seeds_agree():
    """Two chains are equally good, and chance decides which is faster. A third is a quarter slower."""
    load = Cell(requests=48, concurrency=12, output_tokens=(64, 192))
    configs = [SpecConfig(1, steps, steps + 1) for steps in (5, 4, 1)]
    plans = [plan(load.with_values(seed=seed), configs=configs) for seed in range(5)]
    assert {found.best.config.num_steps for found in plans} == {4}
    assert {min(found.candidates, key=lambda row: row.regret).config.num_steps for found in plans} == {4, 5}


def test_where_requests_come_at_a_rate_latency_is_optimised():
    load = CELL.with_values(rate=20.0, requests=8)
    assert plan(load, replicates=1).objective == "latency"
    assert plan(CELL.with_values(requests=8), replicates=1).objective == "throughput"


def test_the_load_has_its_row_among_the_batches():
    found = planned()
    assert [each.batch for each in found.by_batch] == [1, 2, 4, 8, 16, 32, 64, 128]
    (own,) = (each for each in found.by_batch if each.is_simulated)
    assert own.batch == 8
    assert own.config == found.best.config
    assert own.tokens_per_s == found.best.metrics["Output Throughput (tok/s)"]
    assert own.speedup == pytest.approx(found.over_plain(found.best))
    few = plan(replace(CELL, concurrency=100, requests=5), configs=[SpecConfig.plain()], replicates=1)
    assert [each.batch for each in few.by_batch if each.is_simulated] == [5]
    rate = plan(replace(CELL, rate=9.0, requests=5), configs=[SpecConfig.plain()], replicates=1)
    assert not any(each.is_simulated for each in rate.by_batch)


def test_speed_ups_have_bands_about_them():
    found = plan(CELL, configs=[SpecConfig.plain(), SpecConfig(1, 2, 3)], replicates=1)
    for choice in found.by_batch:
        low, high = choice.span
        assert low < choice.speedup < high
        assert high / low == pytest.approx(choice.computed_band[1] / choice.computed_band[0])
    assert found.by_batch[0].span[1] < 1.5 * found.by_batch[0].span[0]
    drafts = next(each for each in found.candidates if each.config.num_steps)
    low, high = found.band(drafts)
    assert low < found.over_plain(drafts) < high
    sure = next(each for each in found.candidates if each.config.is_plain)
    assert found.band(sure)[1] / found.band(sure)[0] < high / low


def test_batches_that_do_not_fit_are_not_listed():
    tight = Cell(hardware="RTX-4090", requests=4, concurrency=2, prompt_tokens=3000, output_tokens=40)
    found = plan(tight, configs=[SpecConfig.plain(), SpecConfig(1, 2, 3)], replicates=1)
    most = SteadyBatch.of(tight.serving(Option.plain())).most_requests(Option.plain())
    assert [each.batch for each in found.by_batch] == [1, 2, 4, 8, 16, most]
    assert 16 < most < 32


def test_plain_decoding_may_have_a_schedule_of_its_own():
    sync = CELL.with_values(schedule="sync")
    mixed = sync.with_values(plain_schedule="overlap")
    configs = [SpecConfig.plain(), SpecConfig(1, 2, 3)]
    throughputs = {}
    for name, cell in {"sync": sync, "overlap": CELL, "mixed": mixed}.items():
        rows = plan(cell, configs=configs, replicates=1).candidates
        throughputs[name] = {row.config.num_steps: row.metrics["Output Throughput (tok/s)"] for row in rows}
    assert throughputs["mixed"] == {0: throughputs["overlap"][0], 2: throughputs["sync"][2]}
    assert throughputs["sync"][0] < throughputs["overlap"][0]
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("plain_schedule", "overlap")):
        policy_metrics(mixed, 8)


def test_drafts_pay_in_small_batches_and_not_in_large_ones():
    hard = replace(CELL, hardware="RTX-4090", shares=((0.3,), (0.2,)), max_running=1000)
    found = plan(hard, configs=[SpecConfig.plain(), SpecConfig(1, 1, 2), SpecConfig(1, 2, 3)])
    assert not found.by_batch[0].config.is_plain
    assert found.by_batch[0].speedup > 1.05
    assert found.crossover is not None
    assert all(each.config.is_plain == (each.batch >= found.crossover) for each in found.by_batch)


def test_speed_up_and_crossover_ignore_drafts_beyond_the_setting():
    scenario, config = CELL.scenario, SpecConfig(1, 2, 3)
    own, longer = (replace(scenario, option=Option(config, iid(0.6, drafts))) for drafts in (2, 5))
    assert longer.speedup(1) == own.speedup(1) < 3
    assert longer.crossover() == own.crossover() is not None


def test_a_plan_of_trees_has_no_flags_for_engines_of_chains():
    found = plan(CELL, configs=[SpecConfig(2, 2, 4)])
    assert found.best_chain is None
    value = found.to_json()
    assert value["vllm"] is None
    assert "--speculative-eagle-topk 2" in value["sglang"]


def test_a_plan_of_no_settings_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("configs", [])):
        plan(CELL, configs=[])


def test_schedules_reach_the_most_running_requests():
    found = planned()
    for ranges in (found.chains, found.schedule):
        assert (ranges[0].low, ranges[-1].high) == (1, CELL.max_running)
    assert {each.config.topk for each in found.chains} == {1}
    assert found.to_json()["schedule"][0]["config"]["num_steps"] == found.schedule[0].config.num_steps


def test_goodput_needs_objectives_and_is_the_default_with_them():
    slo = Slo(e2e=100.0)
    found = plan(CELL, replicates=1, configs=[SpecConfig.plain(), SpecConfig(1, 2, 3)], slo=slo)
    assert found.objective == "goodput"
    goodput = [each.metrics["Request Goodput (req/s)"] for each in found.candidates]
    assert goodput == [each.metrics["Request Throughput (req/s)"] for each in found.candidates]
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("objective", "goodput")):
        plan(CELL, "goodput")


def test_settings_without_a_good_request_are_compared():
    configs = [SpecConfig.plain(), SpecConfig(1, 2, 3)]
    found = plan(CELL, replicates=2, configs=configs, slo=Slo(e2e=1e-6))
    assert all(each.metrics["Request Goodput (req/s)"] == 0 for each in found.candidates)
    assert all(np.isfinite(each.regret) for each in found.candidates)
    assert found.over_plain(found.best) == np.inf
