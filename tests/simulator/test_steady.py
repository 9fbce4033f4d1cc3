"""A steady batch: its closed form against the simulation, and the requests that it can hold."""

from dataclasses import replace

import pytest

from specsim import SpecConfig
from specsim.simulator.acceptance import Option, PerPosition, iid, mean_rounds
from specsim.simulator.cell import Cell
from specsim.simulator.schedule import SteadyBatch

CONFIGS = {"plain": SpecConfig.plain(), "chain": SpecConfig(1, 3, 4), "tree": SpecConfig(4, 5, 16)}


@pytest.mark.parametrize("prefill", ["mixed", "beside", "first"])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("setting", CONFIGS)
@pytest.mark.parametrize("clients", [1, 4, 40])
def test_a_long_run_has_the_throughput_of_a_steady_batch(prefill, schedule, setting, clients):
    """The prompts take a third of the time: leaving them out would be 30 to 50 % off."""
    cell = Cell(
        requests=40 + 20 * clients,
        concurrency=clients,
        prompt_tokens=(1000, 3000),
        output_tokens=(40, 120),
        prefill=prefill,
        schedule=schedule,
    )
    option = cell.option(CONFIGS[setting])
    scenario = cell.serving(option)
    simulated = scenario.run(option).metrics()["Output Throughput (tok/s)"]
    assert SteadyBatch.of(scenario).tokens_per_s(option, clients) == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("setting", CONFIGS)
def test_short_outputs_take_the_additional_round_of_overlap(schedule, setting):
    """A round of 3 to 8: without it the throughput would be 10 to 30 % off."""
    cell = Cell(requests=300, concurrency=4, prompt_tokens=(10, 30), output_tokens=(6, 12), schedule=schedule)
    option = cell.option(CONFIGS[setting])
    scenario = cell.serving(option)
    simulated = scenario.run(option).metrics()["Output Throughput (tok/s)"]
    assert SteadyBatch.of(scenario).tokens_per_s(option, 4) == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("chunk_tokens", [300, None])
def test_prompts_longer_than_a_chunk_take_several_steps(chunk_tokens):
    cell = Cell(requests=60, concurrency=2, prompt_tokens=4000, output_tokens=20, chunk_tokens=chunk_tokens)
    option = cell.option(SpecConfig(1, 3, 4))
    scenario = cell.serving(option)
    simulated = scenario.run(option).metrics()["Output Throughput (tok/s)"]
    assert SteadyBatch.of(scenario).tokens_per_s(option, 2) == pytest.approx(simulated, rel=0.05)


def test_requests_beyond_the_kv_slots_bring_nothing():
    cell = Cell(hardware="RTX-4090", prompt_tokens=2000, output_tokens=100)
    scenario = cell.serving(cell.option(cell.config))
    batch = SteadyBatch.of(scenario)
    most = batch.most_requests(scenario.option)
    slots = scenario.slots(scenario.option)
    assert most == slots // 2112  # 2100 columns and those of two rounds of 4, in pages of 16
    assert 1 < most < scenario.max_running
    assert batch.tokens_per_s(scenario.option, most - 1) < batch.tokens_per_s(scenario.option, most)
    assert batch.tokens_per_s(scenario.option, most + 50) == batch.tokens_per_s(scenario.option, most)
    few = replace(scenario, max_running=3)
    assert SteadyBatch.of(few).most_requests(scenario.option) == 3


def test_rounds_of_a_request_by_hand():
    chain = Option(SpecConfig(1, 1, 2), PerPosition((0.5,)))
    assert [mean_rounds(chain, tokens) for tokens in range(4)] == [0, 1, 1.5, 2.25]
    assert mean_rounds(Option.plain(), 7) == 7
    assert mean_rounds(Option(SpecConfig(1, 3, 4), iid(1.0, 5)), 9) == 3  # 4, 4 and 1 of 4 tokens
    assert mean_rounds(Option(SpecConfig(1, 5, 6), iid(1.0, 5)), 3) == 1
