"""Times of the front end come from the profile, unless the workload has its own."""

from dataclasses import replace

import pytest

from specsim import SpecConfig
from specsim.simulator import drafter, hardware, model
from specsim.simulator.acceptance import Option, PerPosition
from specsim.simulator.calibration.profile import profile
from specsim.simulator.efficiency import FrontEnd
from specsim.simulator.scenario import Scenario, ratio_ranges, with_profile
from specsim.simulator.schedule import SteadyBatch
from specsim.simulator.workload import closed_loop, poisson

CHAIN = Option(SpecConfig(1, 3, 4), PerPosition((0.68, 0.40, 0.21)))
WORK = closed_loop(8, 1, 64, 8)
OWN = profile("vllm-2026-dense")
TTFT = "Mean TTFT (ms)"


@pytest.fixture(scope="module")
def uncalibrated():
    target = model("llama-3.1-8b")
    return Scenario(target, hardware("B200"), drafter("eagle3", target, 32000), CHAIN, WORK)


def test_requests_wait_for_the_front_end_of_the_profile(uncalibrated):
    apart = replace(uncalibrated, workload=poisson(8, 0.01, 64, 8))
    there = with_profile(apart, OWN)
    assert there.front == OWN.front
    assert OWN.front.latency > OWN.front.intake > 0
    without = replace(there, front=None)
    gained = there.run(CHAIN).metrics()[TTFT] - without.run(CHAIN).metrics()[TTFT]
    assert gained == pytest.approx(1e3 * (OWN.front.intake + OWN.front.latency))


def test_a_workload_keeps_a_front_end_of_its_own(uncalibrated):
    given = with_profile(replace(uncalibrated, workload=replace(WORK, intake=0.5)), OWN)
    assert given.arriving.intake == 0.5
    assert with_profile(uncalibrated, profile("vllm-2025-dense")).arriving.latency == 0


def test_a_full_batch_is_no_quicker_than_the_front_end(uncalibrated):
    slow = replace(with_profile(uncalibrated, OWN), front=FrontEnd(intake=1.0))
    batch = SteadyBatch.of(slow)
    assert batch.tokens_per_s(CHAIN, 16) == pytest.approx(batch.output_tokens)


def test_bands_include_the_uncertainty_of_the_front_end(uncalibrated):
    """The ratio of first tokens' times depends on a front end that is known within an interval."""
    there = with_profile(uncalibrated, OWN)
    runs = there.run(there.plain), there.run(CHAIN)
    ranges = ratio_ranges(there, *runs), ratio_ranges(replace(there, front=None), *runs)
    widths = [each[TTFT].highest / each[TTFT].lowest for each in ranges]
    assert widths[0] != pytest.approx(widths[1], rel=1e-3)
