"""Replicates: the same requests for every setting, different ones for every replicate, and the true spread."""

import numpy as np
import pytest
from scipy.stats import t

from specsim import SpecConfig
from specsim.simulator.candidates import CHANCE, EQUAL, Replicated, cheapness, run_replicates, seeds
from specsim.simulator.cell import Cell

CELL = Cell(requests=20, concurrency=4, prompt_tokens=(20, 60), output_tokens=(20, 60), seed=7)
CHAINS = [SpecConfig(1, steps, steps + 1) for steps in (0, 1, 3)]


def latency(run) -> float:
    return run["Mean E2E Latency (ms)"]


def costs(config: SpecConfig, count: int) -> np.ndarray:
    """Latencies of a setting's runs, each simulated by itself."""
    cells = (CELL.with_values(seed=seed, num_steps=config.num_steps) for seed in seeds(CELL.seed, count))
    return np.array([latency(cell.run().metrics()) for cell in cells])


def test_regret_and_spread_are_those_of_paired_runs():
    found = run_replicates(CELL, [CELL.option(config) for config in CHAINS], 4, latency)
    plain, one, three = (costs(config, 4) for config in CHAINS)
    assert three.mean() < one.mean() < plain.mean()
    for each, own in zip(found, (plain, one, three), strict=True):
        assert latency(each.metrics) == pytest.approx(own.mean())
        assert each.regret == pytest.approx(own.mean() / three.mean() - 1)
        low, high = t.interval(0.95, 3, scale=(own - three).std(ddof=1) / 2) if each.regret else (0, 0)
        assert each.spread == pytest.approx((high - low) / 2 / three.mean())


def test_every_setting_serves_the_same_requests_and_uniforms():
    option = CELL.option(SpecConfig(1, 2, 3))
    for each in run_replicates(CELL, [option, option], 3, latency):
        assert (each.regret, each.spread) == (0, 0)
    assert len({tuple(costs(SpecConfig(1, 2, 3), 3))}) == 1
    assert len(set(costs(SpecConfig(1, 2, 3), 3))) == 3  # other requests in every replicate


def test_a_single_run_has_no_spread():
    (only,) = run_replicates(CELL, [CELL.option(CHAINS[1])], 1, latency)
    assert only.spread is None
    assert only.is_equal


def test_no_two_seeds_share_a_replicate():
    named = [each for seed in range(5) for each in seeds(seed, 4)]
    assert named == list(range(20))
    assert seeds(2**64 - 1, 3) == [2**64 - 3, 2**64 - 2, 2**64 - 1]


@pytest.mark.parametrize(
    ("regret", "spread", "is_equal"),
    [
        (EQUAL, 0.0, True),
        (EQUAL + 1e-9, 0.0, False),
        (EQUAL + 1e-9, None, False),
        (0.02, 0.02, True),
        (0.02, 0.0199, False),
        (CHANCE, 0.2, True),
        (CHANCE + 1e-9, 0.2, False),
    ],
)
def test_settings_within_the_spread_or_one_percent_are_equal(regret, spread, is_equal):
    assert Replicated(CELL.option(CHAINS[1]), {}, regret, spread).is_equal == is_equal


def test_cheaper_is_fewer_draft_tokens_then_steps_then_lanes():
    order = [(1, 0, 1), (1, 3, 4), (2, 3, 8), (2, 4, 8), (3, 4, 8), (2, 5, 8), (1, 8, 9), (4, 3, 16)]
    configs = [SpecConfig(*each) for each in reversed(order)]
    assert sorted(configs, key=cheapness) == configs[::-1]
