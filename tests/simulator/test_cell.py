"""Cells have the defaults of the commands, and refuse values that are not acceptance rates."""

import json
from pathlib import Path

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.acceptance.files import read_record
from specsim.cli import server_options
from specsim.cli.plan import PlanOptions
from specsim.cli.simulate import SimulateOptions
from specsim.cli.sweep import SweepOptions
from specsim.core.errors import InputError
from specsim.simulator.calibration.profile import profile
from specsim.simulator.cell import Cell
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.rank_by_depth import chain_shares

PLAN = PlanOptions()
SWEEP = SweepOptions(out=Path("cells.sqlite"), vary=["seed=1"])


@pytest.mark.parametrize("options", [PLAN, SWEEP])
def test_defaults_of_commands_are_those_of_a_cell(options):
    assert options.cell() == Cell(profile="vllm-2026-dense")


@pytest.mark.parametrize(
    ("options", "means"), [(PLAN, (512, 256)), (SWEEP, (512, 256)), (SimulateOptions(), (512, 128))]
)
def test_lengths_are_spread_by_default(options, means):
    lengths = [server_options.length(name, getattr(options, name)) for name in ("prompt_tokens", "output_tokens")]
    assert all(least < most for least, most in lengths)
    assert [np.mean(each) for each in lengths] == list(means)


def test_requests_of_the_default_lengths_do_not_synchronise():
    plain = Cell(requests=64, num_steps=0)
    equal = plain.with_values(prompt_tokens=512, output_tokens=256)
    spread, together = (cell.run().metrics()["Mean TTFT (ms)"] for cell in (plain, equal))
    assert spread < together / 2


def test_an_efficiency_changes_what_is_simulated():
    cell = Cell(requests=4, output_tokens=20)
    slow = cell.with_values(efficiency=Efficiency(bandwidth=0.4))
    assert slow.scenario.efficiency.bandwidth == 0.4
    assert slow.run().duration > 1.5 * cell.run().duration


def test_plain_decoding_takes_its_own_schedule():
    cell = Cell(schedule="sync", plain_schedule="overlap")
    scenario = cell.scenario
    for option, expected in ((scenario.plain, "overlap"), (scenario.option, "sync")):
        assert scenario.serving(option).schedule == cell.serving(option).serving(option).schedule == expected
    same = cell.with_values(plain_schedule=None).scenario
    assert same.serving(same.plain).schedule == "sync"
    assert scenario.speedup(1) < same.speedup(1)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("plain_schedule", "never")):
        _ = Cell(plain_schedule="never").scenario


def test_a_schedule_of_plain_decoding_precedes_the_profiles(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile("specsim-fast").to_json() | {"plain_schedule": "overlap"}))
    for plain_schedule, expected in ((None, "overlap"), ("sync", "sync")):
        scenario = Cell(plain_schedule=plain_schedule, profile=str(path)).scenario
        assert scenario.serving(scenario.plain).schedule == expected


@pytest.mark.parametrize(("config", "name"), [(SpecConfig(1, 3, 4), "num_steps"), (SpecConfig(3, 2, 6), "topk")])
def test_settings_beyond_the_shares_are_refused(config, name):
    cell = Cell(shares=((0.5, 0.2), (0.5, 0.1, 0.1)))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, 3)):
        cell.option(config)


@pytest.mark.parametrize("name", ["schedule", "plain_schedule", "prefill", "kv_cache_dtype", "drafter"])
def test_an_unknown_text_means_no_default(name):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, "nonsense")):
        Cell(**{name: "nonsense"}, profile="vllm-2026-dense")


def test_shares_of_a_chain_give_its_rates_back():
    assert chain_shares((0.8, 0.4, 0.0, 0.0)) == ((0.8,), (0.5,), (0.0,), (0.0,))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("accept_rates", (0.4, 0.5))):
        chain_shares((0.4, 0.5))


@pytest.mark.parametrize(
    "value",
    [
        {"shares": []},
        {"shares": [[]]},
        {"shares": [[0.5], []]},
        {"shares": [0.5]},
        {"shares": ["01"]},
        {"shares": [[True]]},
        {"shares": [["0.5"]]},
        {"shares": [[10**400]]},
        {"shares": [[1.5]]},
        {"shares": 0.5},
    ],
)
def test_values_that_are_no_acceptance_are_refused(tmp_path, value):
    path = tmp_path / "shares.json"
    for other in ({"rates": [[0.5]]}, [[0.5]]):
        path.write_text(json.dumps(other))
        with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("acceptance", str(path))):
            read_record(path)
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, check=lambda error: error.name == "shares" and str(path) in str(error)):
        read_record(path)
    with pytest.raises(InputError, check=lambda error: error.name == "shares"):
        Cell(shares=value["shares"])
