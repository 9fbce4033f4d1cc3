"""The simulator against the scheduler that serves requests: the same steps, rounds, preemptions and ends."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsim import SpecConfig
from specsim.bench.simulated import difference, serve, simulated
from specsim.core.config import ServingConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine
from specsim.simulator.server import round_pages
from specsim.simulator.workload import SimulatedWorkload

TREE = SpecConfig(2, 3, 6, page_size=4, max_len=64)
CHAIN = SpecConfig(1, 2, 3, page_size=1, max_len=64)
RELEASED = replace(TREE, release="round", extend="ragged")


@cache
def engine(config: SpecConfig) -> Engine:
    return load_engine(make_pair("eagle-noisy"), config, EngineOptions("reference", torch.float64))


@st.composite
def cases(draw) -> tuple[SpecConfig, SimulatedWorkload, ServingConfig]:
    config = draw(st.sampled_from([TREE, CHAIN, RELEASED]))
    count = draw(st.integers(1, 7))
    several = lambda least, most: np.array(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))  # noqa: E731
    prompts = several(1, 30)
    outputs = several(1, 16)
    arrivals = np.cumsum(several(0, 12) * several(0, 1)) * 0.75
    lengths = np.arange(1, max(prompts + outputs))
    least = int(round_pages(lengths, (config,)).max()) * config.page_size
    serving = ServingConfig(
        "sync" if config.release == "round" else draw(st.sampled_from(["sync", "overlap"])),
        draw(st.integers(1, 6)),
        least + draw(st.sampled_from([0, 8, 20, 40, 1000])),
        draw(st.sampled_from([None, 5, 11, 40])),
        preemption=draw(st.sampled_from(["latest", "shortest", "longest"])),
    )
    return config, SimulatedWorkload(prompts, outputs, arrivals), serving


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_steps_are_the_schedulers(case):
    config, work, serving = case
    served = serve(engine(config), work, serving)
    assert difference(served, simulated(engine(config), work, serving, served)) == ""


LENGTHS = [(0, 9, 12), (0, 21, 9), (0, 4, 20), (2, 13, 7), (3, 6, 15), (3, 30, 8), (4, 5, 5), (7, 17, 11), (9, 3, 18)]


@pytest.mark.parametrize(
    ("config", "serving"),
    [
        (TREE, ServingConfig("sync", 5, 148, chunk_tokens=11, preemption="longest")),
        (TREE, ServingConfig("overlap", 5, 148, preemption="latest")),
        (TREE, ServingConfig("overlap", 5, 148, chunk_tokens=5, preemption="shortest")),
        (RELEASED, ServingConfig("sync", 6, 96, preemption="shortest")),
        (CHAIN, ServingConfig("overlap", 5, 90, chunk_tokens=9)),
    ],
)
def test_preemptions_are_the_schedulers(config, serving):
    arrivals, prompts, outputs = (np.array(column) for column in zip(*LENGTHS, strict=True))
    work = SimulatedWorkload(prompts, outputs, arrivals * 1.5)
    served = serve(engine(config), work, serving)
    run = simulated(engine(config), work, serving, served)
    assert difference(served, run) == ""
    assert run.preemptions.sum() > 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("number of steps", lambda served: served.starts.append(9.0)),
        ("requests in each round", lambda served: served.running.__setitem__(0, 9)),
        ("preemptions", lambda served: served.requests.__setitem__(0, replace(served.requests[0], preemptions=9))),
        ("step of each end", lambda served: served.requests.__setitem__(0, replace(served.requests[0], last_step=0))),
    ],
)
def test_a_difference_is_named(name, change):
    work = SimulatedWorkload(np.array([9, 4]), np.array([6, 5]), np.zeros(2))
    serving = ServingConfig("sync", 4, 1000)
    served = serve(engine(CHAIN), work, serving)
    run = simulated(engine(CHAIN), work, serving, served)
    change(served)
    assert difference(served, run).startswith(name)
