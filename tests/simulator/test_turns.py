"""Turns of conversations: the steps of the simulated server are those of the scheduler with its prefix cache."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import make_request
from specsim.serving.scheduler import Scheduler
from specsim.simulator.acceptance import Option, RecordedAcceptance
from specsim.simulator.server import simulate
from specsim.simulator.workload import SimulatedWorkload

TREE = SpecConfig(2, 3, 6, page_size=4, max_len=64)


@dataclass
class Ticks:
    """A clock of steps: a step that prefills, runs a round or does both takes 1."""

    prefilled: bool = False

    def prefill(self, new_tokens, contexts) -> float:
        self.prefilled = True
        return 1.0

    def round(self, contexts, config) -> float:
        seconds = 0.0 if self.prefilled else 1.0
        self.prefilled = False
        return seconds


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("config", [TREE, SpecConfig(1, 2, 3, page_size=1, max_len=64)], ids=["tree", "chain"])
def test_steps_of_turns_are_those_of_the_prefix_cache(schedule, config):
    """Turns that arrive after the turn before them, with prompts in chunks of 5 tokens, next to other requests."""
    serving = ServingConfig(schedule, 5, 1000, chunk_tokens=5, prefix_cache=True)
    pair = make_pair("eagle-noisy")
    scheduler = Scheduler(load_engine(pair, config, EngineOptions("reference", torch.float64)), serving)
    history = [7 * place % 47 for place in range(19)]
    prompts = [[2] * 4, history, [*history, 5, 6, 7, 8, 9, 10, 11], [3] * 12, [*history[:14], 40, 41, 42]]
    arrivals, outputs = np.array([0, 0, 12, 13, 14]), np.array([55, 4, 9, 9, 9])
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=int(outputs[number]), ignore_eos=True)
            arrival = int(arrivals[number])
            scheduler.submit(make_request(pair.target.config, None, number, prompt, params, arrival=arrival))
        scheduler.run()
    requests = scheduler.requests
    reused = np.array([request.num_reused for request in requests.values()])
    assert (reused > 0).tolist() == [False, False, True, False, True]
    late = schedule == "overlap"
    option = Option(
        config, RecordedAcceptance(tuple(np.array(each.accepted) - 1 for each in requests.values()), config.num_steps)
    )
    lengths = np.array([len(prompt) for prompt in prompts])
    work = SimulatedWorkload(lengths, outputs, np.maximum(arrivals - late, 0.0), cached_tokens=reused)
    run = simulate(Ticks(), option, work, replace(serving, prefix_cache=False), prefill="beside", log=True)
    for number, request in requests.items():
        first, last = request.emissions[0][0] - late, request.emissions[-1][0] - late
        assert (run.first_steps[number], run.last_steps[number]) == (first, last)
    assert sum(step.prompt_tokens for step in run.log) == lengths.sum() - reused.sum()
