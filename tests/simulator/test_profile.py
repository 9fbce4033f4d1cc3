"""Profiles survive files, and every shipped one is what its tables give."""

import json

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.maintain.profiles import engines, shipped
from specsim.simulator import model
from specsim.simulator.calibration.observation import PRIORS
from specsim.simulator.calibration.profile import DEFAULT, Profile, default_name, names, profile
from specsim.simulator.calibration.published import tables
from specsim.simulator.cell import Cell

QUICK = ("specsim-fast", "vllm-2025-dense")


def test_a_profile_survives_json():
    for name in names():
        found = profile(name)
        value = found.to_json()
        again = Profile.of(json.loads(json.dumps(value)), "a file")
        assert again.to_json() == value
        assert again.server == found.server


def test_a_profile_is_the_present_content_of_its_file(tmp_path):
    path = tmp_path / "p.json"
    value = profile("specsim-fast").to_json()
    for bandwidth in (0.5, 0.25):
        value["parameters"]["bandwidth"]["value"] = bandwidth
        path.write_text(json.dumps(value))
        assert profile(str(path)).posterior.values["bandwidth"] == pytest.approx(bandwidth)
    assert profile(str(path)) is profile(str(path))  # read once for many simulations
    path.unlink()
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("profile", str(path))):
        profile(str(path))


@pytest.mark.parametrize(("name", "wrong"), [("graphs", "x"), ("schedule", "late"), ("plain_schedule", ["sync"])])
def test_an_unknown_text_of_a_profile_is_refused(name, wrong):
    value = profile("specsim-fast").to_json() | {name: wrong}
    with pytest.raises(InputError, check=lambda error: error.name == name and "p.json" in str(error)):
        Profile.of(value, "p.json")


@pytest.mark.parametrize("name", QUICK)
def test_a_shipped_profile_is_the_fit_of_its_tables(name):
    made = shipped(name, engines(tables())[name])
    kept = profile(name)
    assert made.structure == kept.structure
    assert made.posterior.names == kept.posterior.names
    for parameter in kept.posterior.determined:
        assert made.posterior.values[parameter] == pytest.approx(kept.posterior.values[parameter], rel=0.05)
    assert made.provenance == kept.provenance


def test_the_default_follows_from_the_model():
    assert set(DEFAULT.values()) < set(names())
    assert default_name(model("llama-3.1-8b")) == "vllm-2026-dense"
    assert default_name(model("gpt-oss-20b")) == "vllm-2026-experts"


def test_a_cell_takes_the_parameters_of_its_profile():
    cell = Cell(profile="vllm-2025-dense")
    scenario = cell.scenario
    assert (scenario.schedule, scenario.graphs, scenario.profile.name) == ("sync", "target", "vllm-2025-dense")
    assert scenario.efficiency.launch == profile("vllm-2025-dense").posterior.values["launch"]
    assert Cell().scenario.profile is None


def test_moved_parameters_stay_within_their_bounds():
    found = profile("sglang-2026-experts")
    far = found.at(found.posterior.logs + 50)
    assert far.found["bandwidth"] == PRIORS["bandwidth"].most
    assert far.skew == PRIORS["skew"].most


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "specsim/profile/0"},
        {"covariance": [[1.0]]},
        {"discrepancy": -1.0},
        {"discrepancy": None},
        {"parameters": {"speed": {"value": 1.0}}},
        {"parameters": None},
    ],
)
def test_another_file_is_refused(tmp_path, change):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile("specsim-fast").to_json() | change))
    with pytest.raises(InputError, check=lambda error: error.name in ("profile", "parameters")):
        profile(str(path))
    with pytest.raises(InputError, check=lambda error: error.name == "profile"):
        profile(str(tmp_path / "nothing.json"))


def test_missing_parameters_are_as_uncertain_as_assumed():
    full = profile("specsim-fast").posterior.with_priors()
    assert "collective" in full.names
    assert full.deviations["collective"] == pytest.approx(PRIORS["collective"].spread)
    assert full.covariance.shape == (len(full.names),) * 2
    assert np.linalg.eigvalsh(full.covariance).min() >= -1e-9
