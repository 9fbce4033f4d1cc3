"""The compiled loop and the interpreted one, with and without tables of the cost model: equal, bit for bit."""

import importlib
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsim import SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.core.policies.policy import Always
from specsim.simulator import CostModel, compiled, drafter, hardware, model, places, steps
from specsim.simulator.acceptance import Callback, Mixture, Option, RecordedAcceptance, iid, steady
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.initial_state import PREFILLS, Simulation, initial_state, round_pages
from specsim.simulator.plan import policies
from specsim.simulator.results import SimulatedRun
from specsim.simulator.server import Server
from specsim.simulator.state import with_objects
from specsim.simulator.workload import SimulatedWorkload, closed_loop, poisson

HOST = Efficiency(host=3e-4, host_request=2e-6, host_drafts=1e-4, filters=1e-5)
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def switched(value: str):
    with patch.dict(os.environ, {compiled.SWITCH: value}):
        yield


def served(simulation: Simulation, is_compiled: bool) -> SimulatedRun:
    loop = compiled.compiled_steps() if is_compiled else steps
    assert loop is not None
    return Server(simulation, loop).serve()


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


@dataclass(frozen=True)
class Answers:
    """The same seconds as a cost model's, without its tables."""

    model: CostModel
    schedule: str

    def prefill(self, new_tokens, contexts) -> float:
        return self.model.prefill(new_tokens, contexts)

    def round(self, contexts, config) -> float:
        return self.model.round(contexts, config)

    def mixed(self, new_tokens, behind, contexts, config) -> float:
        return self.model.mixed(new_tokens, behind, contexts, config)


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
def simulations(draw) -> Simulation:
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
    return Simulation(cost, (option,), work, serving, prefill, Always(), draw(st.integers(0, 9)), log=True)


@FEW
@given(simulations())
def test_compiled_and_interpreted_runs_are_equal(simulation):
    pytest.importorskip("numba")
    assert_equal(served(simulation, True), served(simulation, False))


@FEW
@given(simulations())
def test_tables_give_the_cost_models_seconds(simulation):
    answers = replace(simulation, cost=Answers(simulation.cost, simulation.cost.schedule))
    assert_equal(served(simulation, False), served(answers, False))


@FEW
@given(simulations())
def test_scheduled_drafts_are_those_of_the_rounds(simulation):
    option = simulation.options[0]
    answered = Option(option.config, Callback(option.acceptance.accepted, option.acceptance.num_steps))
    assert_equal(served(simulation, False), served(replace(simulation, options=(answered,)), False))


@pytest.mark.parametrize("name", ["off above 4", "moving average", "throughput", "goodput", "2 drafts"])
def test_policies_choose_alike_in_both_loops(name):
    pytest.importorskip("numba")
    target = model("llama-3-8b")
    cost = CostModel(hardware("H100-SXM"), target, drafter("eagle3", target, 32000), HOST)
    chains = (Option.plain(), Option(SpecConfig(1, 2, 3), iid(0.8, 2)), Option(SpecConfig(1, 4, 5), iid(0.6, 4)))
    work = poisson(60, 100.0, (20, 200), (1, 60))
    runs = [
        served(
            Simulation(
                cost,
                chains,
                work,
                ServingConfig("overlap", 16, 10**5),
                "mixed",
                policies(cost, chains, 4)[name],
                0,
                True,
            ),
            is_compiled,
        )
        for is_compiled in (True, False)
    ]
    assert_equal(*runs)
    if name in ("off above 4", "throughput"):
        assert len({step.option for step in runs[0].log} - {-1}) > 1


@given(simulations(), st.integers(1, 500))
def test_pages_follow_from_the_last_page(simulation, length):
    state = with_objects(initial_state(simulation))
    configs = tuple(option.config for option in simulation.options)
    assert places.pages_of(length, state.page_counts) == round_pages(np.array([length]), configs)[0]


def test_a_buffer_that_fills_up_loses_nothing(monkeypatch):
    target = model("llama-3-8b")
    cost = CostModel(hardware("H100-SXM"), target)
    serving = ServingConfig("overlap", 32, 10**5)
    work = closed_loop(100, 32, 50, (1, 90))
    simulation = Simulation(cost, (Option.plain(),), work, serving, "mixed", Always(), 0, True)
    whole = served(simulation, False)
    monkeypatch.setattr("specsim.simulator.initial_state.BUFFER", 3)
    assert_equal(whole, served(simulation, False))
    assert len(whole.log) == whole.num_steps > 3


def test_small_workloads_and_the_switch_load_no_compiler():
    assert compiled.loop(compiled.LEAST_TOKENS - 1) is steps
    with switched("0"):
        assert compiled.loop(compiled.LEAST_TOKENS) is steps
    with switched("yes"), pytest.raises(InputError, check=lambda error: error.name == compiled.SWITCH):
        compiled.loop(1)


def test_without_numba_the_loop_is_interpreted(monkeypatch):
    compiled.compiled_steps.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        assert compiled.loop(10**9) is steps
    finally:
        compiled.compiled_steps.cache_clear()


def test_without_a_folder_for_machine_code_it_still_compiles(monkeypatch):
    numba = pytest.importorskip("numba")
    made = []

    def njit(cache=False, forceinline=False):
        if cache:
            return lambda _: (_ for _ in ()).throw(RuntimeError("cannot cache function: no locator available"))

        def compiled_function(function):
            made.append(function)
            return numba.njit(forceinline=forceinline)(function)

        return compiled_function

    assert compiled._compile(njit, steps.exposed_seconds)(3.0, 1.0, True) == 2.0
    assert made == [steps.exposed_seconds]


def test_a_caller_is_compiled_again_after_its_callee(tmp_path, monkeypatch):
    """The caller's file and its time of change are the same, so numba's own cache would return its old code."""
    called, calling = tmp_path / "called.py", tmp_path / "calling.py"
    calling.write_text("from called import number\n\n\ndef advance():\n    return number()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for value in (1, 2):
        called.write_text(f"def number():\n    return {value}\n# a file of another size{' ' * value}\n")
        modules = []
        for path in (called, calling):
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
            modules.append(importlib.import_module(path.stem))
        made = compiled.compiled_copy(modules, compiled.digest_of(modules))
        assert made.advance() == value
