"""Shares of peaks from one kind of models, parameters on another GPU, and a table's own fit without either."""

from dataclasses import replace

import numpy as np
import pytest

from specsim.simulator.calibration.observation import PRIORS
from specsim.simulator.calibration.posterior import HOST, SHARES, fit, on_another_gpu
from specsim.simulator.calibration.published import tables, with_shares

TABLES = {table.name: table for table in tables()}


def test_experts_take_the_shares_of_dense_models_on_their_gpu():
    for table in TABLES.values():
        others = [each for each in TABLES.values() if each.engine == table.shares_of]
        assert bool(others) == bool(table.shares_of)
        gpus = {cost.hardware.name for each in (table, *others) for cost in each.costs.values()}
        assert not others or len(gpus) == 1
    assert TABLES["vllm_41162, GPT-OSS 20B"].shares_of == TABLES["vllm_41162, Qwen3 8B"].engine


def test_given_shares_hold_a_fit_as_firmly_as_they_are_known(known_server, grid):
    cost = {"": known_server().cost}
    dense = fit(cost, grid)
    priors = with_shares(dense)
    assert {name for name in priors if priors[name] != PRIORS[name]} == set(SHARES)
    assert priors["compute"].spread == pytest.approx(dense.deviations["compute"])
    few = [cell for cell in grid if cell.batch == 1]  # which read weights: no arithmetic is determined
    alone, helped = fit(cost, few), fit(cost, few, priors=priors)
    distances = [abs(np.log(each.values["compute"] / dense.values["compute"])) for each in (alone, helped)]
    assert distances[1] < 0.5 * distances[0]
    assert helped.deviations["compute"] < alone.deviations["compute"]


def test_half_of_a_distance_goes_to_another_machine(known_server, grid):
    found = fit({"": known_server().cost}, grid)
    there = on_another_gpu(found)
    for name in found.names:
        prior = PRIORS[name]
        kept = np.sqrt(prior.value * found.values[name]) if name in (*SHARES, *HOST) else found.values[name]
        assert there.values[name] == pytest.approx(kept)
    variance = 0.25 * found.deviations["compute"] ** 2 + 0.5 * PRIORS["compute"].spread ** 2
    assert there.deviations["compute"] == pytest.approx(np.sqrt(variance))
    assert replace(there, logs=found.logs).deviations["gap"] == pytest.approx(found.deviations["gap"])
