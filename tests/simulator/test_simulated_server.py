"""The simulated server with and without remembered rounds and drawn drafts: equal, bit for bit."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsim import SpecConfig
from specsim.core.config import ServingConfig
from specsim.serving.reservations import RoundPages
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.acceptance import Callback, Mixture, Option, RecordedAcceptance, iid, steady
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.policy_comparison import policies
from specsim.simulator.results import SimulatedRun
from specsim.simulator.runner import PREFILLS
from specsim.simulator.server import round_pages, simulate
from specsim.simulator.workload import SimulatedWorkload, closed_loop, poisson

HOST = Efficiency(host=3e-4, host_request=2e-6, host_drafts=1e-4, filters=1e-5)
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def assert_equal(run: SimulatedRun, other: SimulatedRun) -> None:
    for field in fields(SimulatedRun):
        mine, its = getattr(run, field.name), getattr(other, field.name)
        if field.name == "gaps":
            assert (mine._counts == its._counts).all()
            assert (mine._sums == its._sums).all()
        elif isinstance(mine, np.ndarray):
            assert mine.dtype == its.dtype, field.name
            assert mine.tobytes() == its.tobytes(), field.name
        elif field.name == "accepted_drafts":
            assert [each.tolist() for each in mine] == [each.tolist() for each in its]
        else:
            assert mine == its, field.name


class ForgetfulCost(CostModel):
    """A cost model of whose rounds the simulated server remembers nothing."""


@st.composite
def costs(draw) -> CostModel:
    target = model(draw(st.sampled_from(["llama-3-8b", "gpt-oss-20b", "glm-4.7-flash"])))  # windows, experts
    kind = draw(st.sampled_from(["eagle3", "mtp", None]))
    return CostModel(
        hardware("H100-SXM"),
        target,
        drafter(kind, target, 32000 if kind == "eagle3" else None) if kind else None,
        draw(st.sampled_from([Efficiency(), HOST])),
        schedule=draw(st.sampled_from(["sync", "overlap"])),
        buckets=draw(st.sampled_from([None, (), (1, 2, 4, 8)])),
    )


@st.composite
def options(draw, release: str) -> Option:
    page = draw(st.sampled_from([1, 4, 16]))
    num_steps = draw(st.integers(0, 4))
    if not num_steps:
        return Option.plain(page)
    tree = draw(st.booleans())
    config = SpecConfig(2, num_steps, num_steps + 2, page) if tree else SpecConfig(1, num_steps, num_steps + 1, page)
    recorded = tuple(np.arange(start, start + 5) % (num_steps + 1) for start in range(3))
    acceptance = draw(
        st.sampled_from(
            [
                iid(0.7, num_steps),
                iid(0.5, num_steps + 1),
                steady(1 + num_steps / 2, num_steps),
                Mixture((iid(0.9, num_steps), iid(0.2, num_steps)), (1.0, 2.0)),
                RecordedAcceptance(recorded, num_steps),
                RecordedAcceptance(recorded, num_steps, "position"),
                Callback(lambda rounds: (rounds.request_ids + rounds.positions) % (num_steps + 1), num_steps),
            ]
        )
    )
    return Option(replace(config, release=release), acceptance)


@st.composite
def workloads(draw) -> SimulatedWorkload:
    count = draw(st.integers(1, 40))
    lengths = draw(st.sampled_from([((1, 40), (1, 30)), ((30, 300), (1, 3)), (20, (1, 60))]))
    seed = draw(st.integers(0, 9))
    make = draw(
        st.sampled_from(
            [
                lambda: poisson(count, 40.0, *lengths, seed),
                lambda: poisson(count, 2000.0, *lengths, seed),
                lambda: closed_loop(count, 7, *lengths, seed),
                lambda: replace(closed_loop(count, 7, *lengths, seed), arrivals_s=np.arange(count) // 5 * 0.05),
            ]
        )
    )
    work = replace(make(), intake=draw(st.sampled_from([0.0, 0.002])), latency=draw(st.sampled_from([0.0, 0.01])))
    return replace(work, concurrency=draw(st.integers(1, 9))) if draw(st.booleans()) else work


@st.composite
def simulations(draw) -> dict:
    """Arguments of simulate."""
    cost = draw(costs())
    release = draw(st.sampled_from(["finish", "round"])) if cost.schedule == "sync" else "finish"
    option = draw(options(release))
    serving = ServingConfig(
        cost.schedule,
        draw(st.sampled_from([1, 4, 64])),
        draw(st.sampled_from([512, 1008, 10**6])),
        draw(st.sampled_from([None, 7, 100])),
        preemption=draw(st.sampled_from(["latest", "shortest", "longest"])),
    )
    work = draw(workloads())
    prefill = draw(st.sampled_from(PREFILLS))
    case = {"cost": cost, "options": option, "workload": work, "serving": serving, "prefill": prefill}
    return case | {"seed": draw(st.integers(0, 9)), "log": True}


@FEW
@given(simulations())
def test_remembered_rounds_have_the_cost_models_seconds(simulation):
    cost = simulation["cost"]
    forgetful = ForgetfulCost(*(getattr(cost, field.name) for field in fields(cost) if field.init))
    assert_equal(simulate(**simulation), simulate(**simulation | {"cost": forgetful}))


@FEW
@given(simulations())
def test_scheduled_drafts_are_those_of_the_rounds(simulation):
    option = simulation["options"]
    answered = Option(option.config, Callback(option.acceptance.accepted, option.acceptance.num_steps))
    assert_equal(simulate(**simulation), simulate(**simulation | {"options": answered}))


@pytest.mark.parametrize("name", ["off above 4", "throughput"])
def test_policies_switch_between_settings(name):
    target = model("llama-3-8b")
    cost = CostModel(hardware("H100-SXM"), target, drafter("eagle3", target, 32000), HOST)
    chains = (Option.plain(), Option(SpecConfig(1, 2, 3), iid(0.8, 2)), Option(SpecConfig(1, 4, 5), iid(0.6, 4)))
    work = poisson(60, 100.0, (20, 200), (1, 60))
    serving = ServingConfig("overlap", 16, 10**5)
    run = simulate(cost, chains, work, serving, policy=policies(cost, chains, 4)[name], log=True)
    assert len({step.option for step in run.log} - {-1}) > 1


@given(simulations(), st.integers(1, 500))
def test_pages_of_many_lengths_are_those_of_one(simulation, length):
    configs = (simulation["options"].config,)
    assert RoundPages(configs, 0)[length] == round_pages(np.array([length]), configs)[0]


def test_gaps_that_are_counted_often_are_the_same(monkeypatch):
    work = closed_loop(100, 32, 50, (1, 90))
    run = simulate(CostModel(hardware("H100-SXM"), model("llama-3-8b")), Option.plain(), work, log=True)
    monkeypatch.setattr("specsim.simulator.server.MOST_GAPS", 3)
    assert_equal(run, simulate(CostModel(hardware("H100-SXM"), model("llama-3-8b")), Option.plain(), work, log=True))
    assert len(run.log) == run.num_steps > 3
