"""The range of a speed-up under fitted parameters."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, Efficiency, drafter, hardware, model
from specsim.simulator.acceptance import Option, PerPosition
from specsim.simulator.calibration.observation import PRIORS
from specsim.simulator.calibration.profile import names, profile
from specsim.simulator.efficiency import FittedServer
from specsim.simulator.model import SKEW
from specsim.simulator.reproduce.reproduction import rows
from specsim.simulator.scenario import (
    MOST_REQUESTS,
    Scenario,
    calibration,
    ratio_ranges,
    speedup_range,
    with_parameters,
    with_profile,
)
from specsim.simulator.show import compare
from specsim.simulator.workload import closed_loop, poisson

CHAIN = Option(SpecConfig(1, 3, 4), PerPosition((0.68, 0.40, 0.21)))
H100 = hardware("H100-SXM")
WORK = closed_loop(64, 32, 100, 40)
THROUGHPUT = "Output Throughput (tok/s)"


def scenario(name="llama-3.1-8b", work=WORK, **settings) -> Scenario:
    target = model(name)
    return Scenario(target, H100, drafter("eagle3", target, 32000), CHAIN, work, **settings)


def test_defaults_are_near_a_step_that_was_measured():
    """Plain decoding of vllm#20780, which the fit of its bandwidth has seen, at the mean of two tables' bandwidths."""
    (plain,) = [row for row in rows("vllm_20780") if row["method"] == "none"]
    seconds = CostModel(H100, model("llama-3.1-8b")).round(np.array([300]), SpecConfig.plain())
    assert seconds == pytest.approx(float(plain["tpot_ms"]) * 1e-3, rel=0.05)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b"])
def test_a_band_follows_from_draws_of_the_profile(name):
    """Linear theory gives the spread of speed-ups under draws of the parameters, with the model's own error."""
    found = sharp(profile("vllm-2026-dense" if name == "llama-3.1-8b" else "vllm-2026-experts"))
    own = with_profile(scenario(name), found)
    band = speedup_range(own, 32)
    posterior = found.posterior.with_priors()
    draws = np.random.default_rng(0).multivariate_normal(posterior.logs, posterior.covariance, 400)
    logs = []
    for draw in draws:
        server = replace(found, posterior=replace(posterior, logs=draw)).server
        there = replace(own, efficiency=server.efficiency)
        there = replace(there, model=replace(own.model, skew=server.skew or own.model.skew))
        logs.append(np.log(there.speedup(32)))
    half = 1.645 * np.hypot(np.std(logs), posterior.discrepancy)
    assert np.log(band.highest / band.value) == pytest.approx(half, rel=0.15)
    assert band.lowest * band.highest == pytest.approx(band.value**2)
    assert str(band).endswith(f"simulated with profile {found.name}")


def sharp(found):
    """A profile of the scenario's GPU with a tenth of the uncertainty, where linear theory holds."""
    posterior = found.posterior.with_priors()
    provenance = dict(found.provenance) | {"hardware": H100.name}
    return replace(found, posterior=replace(posterior, covariance=posterior.covariance / 100), provenance=provenance)


def test_another_gpu_keeps_half_of_what_shares_say():
    found = profile("vllm-2026-dense")
    there = found.on("H100-SXM")
    assert found.on("B200") is found
    values, own = there.posterior.values, found.posterior.values
    assert values["bandwidth"] == pytest.approx(np.sqrt(0.8 * own["bandwidth"]))
    assert values["gap"] == own["gap"]
    assert values["launch"] == pytest.approx(np.sqrt(PRIORS["launch"].value * own["launch"]))
    assert there.posterior.deviations["compute"] > 2 * found.posterior.deviations["compute"]
    assert there.posterior.deviations["gap"] == found.posterior.deviations["gap"]


def test_ratios_of_a_workload_have_bands():
    own = with_profile(scenario(), profile("vllm-2026-dense"))
    plain, drafts = own.run(own.plain), own.run(CHAIN)
    found = ratio_ranges(own, plain, drafts)
    own_ratio = drafts.metrics()[THROUGHPUT] / plain.metrics()[THROUGHPUT]
    band = found[THROUGHPUT]
    assert band.lowest < band.value == own_ratio < band.highest
    assert np.log(band.highest / band.value) > 1.645 * own.profile.posterior.discrepancy
    assert "Spec Decode Accept Rate (%)" not in found  # plain decoding has none
    assert compare(own).ratios == found


def test_a_band_serves_the_first_requests_of_a_long_workload(monkeypatch):
    sizes = []
    serve = Scenario.run
    monkeypatch.setattr(Scenario, "run", lambda self, option: sizes.append(len(self.workload)) or serve(self, option))
    own = scenario(work=poisson(MOST_REQUESTS + 5, 1000.0, 20, 2))
    runs = own.run(own.plain), own.run(CHAIN)
    ratio_ranges(own, *runs)
    assert sizes == [MOST_REQUESTS + 5] * 2 + [MOST_REQUESTS] * 6  # at the value, and at both ends of the band


def test_parameters_that_were_given_stay():
    given = scenario("gpt-oss-20b", efficiency=Efficiency(bandwidth=0.5, launch=1e-6), graphs="target", schedule="sync")
    given = replace(given, model=replace(given.model, skew=0.25))
    alone = FittedServer({"gap": 2e-6}, {}, "sync", "none", SKEW)
    for server in (alone, *(profile(name).server for name in names())):
        there = with_parameters(given, server)
        assert (there.efficiency.bandwidth, there.efficiency.launch, there.model.skew) == (0.5, 1e-6, 0.25)
        assert there.efficiency.gap == server.efficiency.gap
        assert there.schedule == "sync"
        assert there.graphs == ("none" if server.graphs == "none" else "target")
    assert calibration(given) == "simulated with bandwidth 0.5, launch 1e-06 as given, uncalibrated otherwise"
    assert calibration(scenario()) == "uncalibrated, simulated"
    made = with_profile(given, profile("vllm-2025-dense"))
    assert (made.efficiency.bandwidth, made.graphs) == (0.5, "target")
    assert calibration(made) == "simulated with profile vllm-2025-dense and bandwidth 0.5, launch 1e-06 as given"


def test_a_speed_up_of_one_is_no_loss():
    assert replace(scenario(), option=Option.plain()).speedup(5) == 1
    assert replace(scenario(), option=Option.plain()).crossover(20) is None


def test_graphs_reach_the_cost():
    alone = {
        graphs: scenario(graphs=graphs, efficiency=Efficiency(launch=1e-3)) for graphs in ("all", "target", "none")
    }
    phases = {graphs: each.phases(CHAIN, 4) for graphs, each in alone.items()}
    kernels = alone["all"].cost(CHAIN).launches
    assert phases["none"].verify == pytest.approx(kernels * 1e-3)
    assert phases["target"].verify == phases["all"].verify < 0.1
    assert phases["target"].draft == phases["none"].draft == pytest.approx(2 * 19 * 1e-3)
    assert phases["all"].draft < 0.01
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("graphs", "some")):
        scenario(graphs="some")


SMALL = ["simulate", "--requests", "20", "--prompt-tokens", "60", "--output-tokens", "10", "--concurrency", "8"]


def test_the_command_names_the_parameters_and_their_range(command, tmp_path):
    path = tmp_path / "result.json"
    ended = command(*SMALL, "--json", str(path))
    result = json.loads(path.read_text())
    assert result["calibration"] == "simulated with profile vllm-2026-dense"
    assert result["profile"] == "vllm-2026-dense"
    ratio = result["ratios"][THROUGHPUT]
    span = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"
    (line,) = [line for line in ended.out.splitlines() if line.startswith(THROUGHPUT)]
    assert line.endswith(f"{ratio['value']:.2f}  {span}")
    assert "Ratios and speed-ups are simulated with profile vllm-2026-dense; bands hold 90%" in ended.out
    given = command(*SMALL, "--efficiency", "bandwidth=0.4", "--json", str(path)).out
    assert "simulated with profile vllm-2026-dense and bandwidth 0.4 as given" in " ".join(given.split())
    experts = command(*SMALL, "--model", "gpt-oss-20b").out
    assert "simulated with profile vllm-2026-experts" in " ".join(experts.split())
    assert command(*SMALL, "--profile", "nothing").refuses("profile", "nothing")
    plain = command(*SMALL, "--drafter", "none").out
    assert "band" not in plain
