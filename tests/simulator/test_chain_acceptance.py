"""Acceptance of a calibration's chains, and plans that take it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specsim.simulator.calibration.posterior import fit
from specsim.simulator.calibration.profile import ChainAcceptance, chain_acceptance, profile

LOAD = ["--requests", "12", "--concurrency", "4", "--prompt-tokens", "20-40", "--output-tokens", "30"]


@pytest.fixture(scope="module")
def cells(known_server):
    rng = np.random.default_rng(5)
    return [known_server().cell(batch, steps, rng) for batch in (1, 16, 64) for steps in (0, 3, 6)]


def test_measured_lengths_come_before_fitted_ones(known_server, cells):
    posterior = fit({"": known_server().cost}, cells)
    found = chain_acceptance("a model", "eagle3", cells, posterior)
    assert not found.is_fitted
    assert 1 + sum(found.rates[:3]) == pytest.approx(2.5)
    assert 1 + sum(found.rates) == pytest.approx(3.1)
    assert found.record("mine").rates == found.rates
    plain = [cell for cell in cells if cell.config.is_plain]
    assert chain_acceptance("a model", "eagle3", plain, posterior) is None


def test_the_interval_of_fitted_lengths_holds_the_true_ones(known_server, cells):
    unknown = [cell if cell.config.is_plain else replace(cell, accept_length=None) for cell in cells]
    posterior = fit({"": known_server().cost}, unknown)
    found = chain_acceptance("a model", "eagle3", unknown, posterior)
    assert found.is_fitted
    assert len(found.rates) == 6
    assert found.low < 3.1 < found.high
    assert found.high / found.low < 1.4
    assert ChainAcceptance.of(json.loads(json.dumps(found.to_json()))).rates == pytest.approx(found.rates, rel=1e-3)


@pytest.fixture
def mine(tmp_path):
    """A profile of a file, with the acceptance of a pair."""
    path = tmp_path / "mine.json"
    acceptance = ChainAcceptance("llama-3.1-8b", "eagle3", (0.6, 0.3), 1.8, 2.0, is_fitted=True)
    path.write_text(json.dumps(replace(profile("vllm-2026-dense"), acceptance=acceptance).to_json()))
    return str(path)


def test_a_plan_takes_the_acceptance_of_its_profile(command, mine):
    said = " ".join(command("plan", *LOAD, "--replicates", "1", "--profile", mine).out.split())
    assert "fitted to throughputs of chains, accept length 1.90 (1.80 to 2.00) at 2 steps" in said
    assert "depth 1, 2, ...: 0.60 0.50 " in said
    given = command("plan", *LOAD, "--replicates", "1", "--profile", mine, "--accept-rates", "0.5")
    assert "depth 1, 2, ...: 0.50, given by --accept-rates" in " ".join(given.out.split())


@pytest.mark.parametrize("words", [["--model", "qwen3-8b"], ["--drafter", "eagle"]])
def test_another_pair_does_not_take_it(command, mine, words):
    said = " ".join(command("plan", *LOAD, "--replicates", "1", "--profile", mine, *words).out.split())
    assert "fitted to throughputs" not in said
    assert "assumed, as published for" in said


def test_a_simulation_takes_it_too(command, mine):
    said = " ".join(command("simulate", *LOAD, "--profile", mine, "--num-steps", "2").out.split())
    assert "Accept length 1.90, as measured: profile" in said
