"""The suite of adaptive policies on Triton's interpreter: equal results pass, injected differences are found."""

from dataclasses import replace

import pytest
import torch

from specsim.bench import adaptive
from specsim.bench.load import LoadRun, LoadServer, Phase, PhaseTime, check_results
from specsim.bench.row import OURS, Timing
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.policies.named import named_policy
from specsim.core.policies.policy import Always, Scripted
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.correctness.differential.pairs import rounded
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.adaptation import Switching
from specsim.serving.generation import load_adaptive_engine
from specsim.serving.outputs import Generation, Output

# Their tensors are on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")
STEPS = (0, 1, 2)
CHAIN = SpecConfig(topk=1, num_steps=2, page_size=4, max_len=40)
RATES = (1.0, 0.5)
OPTIONS = EngineOptions("fast", torch.bfloat16, "cpu", "round")


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(adaptive, "STEPS", STEPS)
    monkeypatch.setattr(adaptive, "CHAIN", CHAIN)
    monkeypatch.setattr(adaptive, "STEADY", RATES)
    monkeypatch.setattr(adaptive, "PROMPT_LEN", 5)
    monkeypatch.setattr(adaptive, "SAMPLES", 1)
    monkeypatch.setattr(adaptive, "MEASURED_TOKENS", 2)
    monkeypatch.setattr(adaptive, "CHECKED_TOKENS", 3)
    return rounded(synthetic_pair("eagle3", "qwen3", num_layers=1), torch.bfloat16)


@pytest.fixture
def server(pair):
    settings = Settings.of_steps(CHAIN, STEPS)
    engine = load_adaptive_engine(pair, settings, OPTIONS, acceptance=SyntheticAcceptance(RATES))
    return LoadServer.of(engine, ServingConfig("overlap", 2, 160), 5, 30)


@interpreted
def test_a_load_accepts_what_its_phases_say(server):
    load = [Phase(2, (1.0, 1.0), 6), Phase(1, (1.0, 0.0), 4)]
    served = server.run(load, Always(2))
    first, second = served.times
    assert first.tokens == 3 * 2 * first.rounds >= 12
    assert second.tokens == 2 * second.rounds >= 4
    assert len(served.results["tokens"]) > first.tokens + second.tokens  # and tokens of the prefills
    assert server.pools.free_slots == server.pools.num_slots


@interpreted
def test_a_scripted_run_of_the_same_settings_is_equal(server):
    load = [Phase(2, RATES, 6)]
    found, same, other = (server.run(load, Scripted(script)) for script in ((2, 0, 1), (2, 0, 1), (2, 1, 0)))
    assert found.choices[:3] == (2, 0, 1)
    assert found.switches >= 2
    assert check_results("runs", found, same).passed
    assert check_results("runs", found, other).difference.startswith("tokens, entry")


@interpreted
def test_policies_are_timed_after_their_checks(pair, monkeypatch):
    monkeypatch.setattr(adaptive, "STEPS", (0, 2))
    bench = adaptive.AdaptiveBench.of(pair, OPTIONS, (1, 2))
    assert bench.fixed_check.passed, bench.fixed_check
    row = bench.row("changing load", [Phase(2, RATES, 3), Phase(1, (0.5, 0.0), 2)], 1.0)
    policies = [OURS, f"{OURS}, moving average", f"{OURS}, table"]
    assert list(row.timings) == [*policies, "steps 0", "steps 2"]
    assert row.setting == {"requests": "2 → 1", "acceptance of a draft": "1 → 0.5"}
    assert row.passed
    best = min(row.timings[f"steps {steps}"].median_us for steps in (0, 2))
    assert row.targets[0].value == row.ours_us / best
    given = bench.policies[OURS].to_json()
    assert given["batch_sizes"] == [1, 2]
    assert set(given["seconds"]) == {"0", "2"}


@interpreted
def test_a_policy_with_other_results_has_no_time(server, monkeypatch):
    policies = adaptive._policies({0: [1.0, 1.0], 1: [1.0, 1.0], 2: [1.0, 9.0]}, (1, 2))
    passed = adaptive.Check("fixed settings", 0, 0)
    bench = adaptive.AdaptiveBench(server, policies, passed, ())
    monkeypatch.setattr(adaptive, "Scripted", lambda choices: Always(0))
    row = bench.row("constant load", [Phase(1, RATES, 4)], 1.0)
    assert not row.passed
    assert OURS not in row.timings
    assert row.targets == ()
    assert "steps 2" in row.timings


def test_the_time_of_a_token_weights_phases_by_their_tokens():
    load = [Phase(1, RATES, 10), Phase(4, RATES, 20)]
    served = LoadRun((PhaseTime(1.0, 4, 8), PhaseTime(1.0, 40, 100)), (), {})
    assert served.us_per_token(load) == pytest.approx(1e6 * (1.0 / 8 * 10 + 1.0 / 100 * 80) / 90)


def test_the_table_has_the_best_steps_of_every_size(monkeypatch):
    monkeypatch.setattr(adaptive, "STEPS", STEPS)
    monkeypatch.setattr(adaptive, "CHAIN", CHAIN)
    monkeypatch.setattr(adaptive, "STEADY", RATES)
    seconds = {0: [1.0, 1.0], 1: [1.5, 3.0], 2: [1.6, 9.0]}
    table = adaptive._policies(seconds, (1, 8))[f"{OURS}, table"]
    assert table.parameters["num_speculative_tokens_per_batch_size"] == [[1, 1, 2], [2, 8, 0]]


def test_the_target_is_the_best_fixed_setting(monkeypatch):
    monkeypatch.setattr(adaptive, "STEPS", (0, 1))
    times = {OURS: Timing(5.0, 0, 1), f"{OURS}, table": Timing(1.0, 0, 1), "steps 0": Timing(8.0, 0, 1)}
    assert adaptive._targets(times, 1.02) == ()
    (target,) = adaptive._targets(times | {"steps 1": Timing(4.0, 0, 1)}, 1.02)
    assert (target.value, target.reached) == (1.25, False)
    (target,) = adaptive._targets(times | {"steps 1": replace(times[OURS])}, 1.02)
    assert target.reached


def test_tokens_of_the_shipped_pair_are_compared(monkeypatch):
    def made(policy: object) -> Generation:
        tokens = (1, 2) if policy == "throughput" else (1, 3)
        named = named_policy("moving-average", CHAIN)
        output = Output("", tokens, (-1.0, -1.0), "length", (2,))
        return Generation((output,), CHAIN, 1.0, switching=Switching(named, (0, 1, 0), (0, 2, 0), 5))

    monkeypatch.setattr(adaptive, "_generate", lambda *given: made(given[-1]))
    rows = list(adaptive.shipped_rows(quick=True, device="cpu"))
    assert [row.setting["policy"] for row in rows] == ["moving-average", "throughput", "scripted"]
    assert [row.passed for row in rows] == [True, False, True]
    assert rows[1].checks[OURS].difference == "requests [0]"
    assert rows[0].notes == ("5 switches, accept length 2.00",)
