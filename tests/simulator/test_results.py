"""Figures of a simulated run, compared with values computed by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.acceptance import Option, iid
from specsim.simulator.server import simulate
from specsim.simulator.workload import SimulatedWorkload

LLAMA = model("llama-3-8b")
COST = CostModel(hardware("H100-SXM"), LLAMA, drafter("eagle3", LLAMA, 32000))
CHAIN = Option(SpecConfig(1, 3, 4), iid(0.6, 3))


@dataclass(frozen=True)
class PerRequest:
    """A step takes a second, and another for each request in its round."""

    def prefill(self, new_tokens, contexts) -> float:
        return 1.0

    def round(self, contexts, config) -> float:
        return 1.0 + len(contexts)

    def mixed(self, new_tokens, behind, contexts, config) -> float:
        return self.round(contexts, config)


def test_itl_counts_every_delivery_of_outputs_of_several_lengths():
    """Both get a first token after 1 s. A round of two takes 3 s, and four more rounds take 2 s each."""
    run = simulate(PerRequest(), Option.plain(), SimulatedWorkload(np.array([5, 5]), np.array([2, 6]), concurrency=2))
    assert (run.lasts - run.arrivals).tolist() == [4.0, 12.0]
    metrics = run.metrics()
    assert metrics["Mean ITL (ms)"] == pytest.approx(1e3 * (3 + 3 + 4 * 2) / 6)
    assert metrics["Mean TPOT (ms)"] == pytest.approx(1e3 * (3 + (3 + 4 * 2) / 5) / 2)
    assert metrics["Median ITL (ms)"] == pytest.approx(2000)
    assert metrics["P99 ITL (ms)"] == pytest.approx(3000)


def test_itl_counts_deliveries_not_tokens():
    """A round that accepts all of its 3 drafts delivers 4 tokens at once."""
    option = Option(SpecConfig(1, 3, 4), iid(1.0, 3))
    run = simulate(PerRequest(), option, SimulatedWorkload(np.array([5, 5]), np.array([5, 9]), concurrency=2))
    assert run.metrics()["Mean ITL (ms)"] == pytest.approx(1e3 * (3 + 3 + 2) / 3)
    assert run.accept_length == 4


@pytest.mark.parametrize("prefill", ["mixed", "beside", "first"])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("concurrency", [None, 2])
def test_a_timeline_that_begins_later_has_the_same_figures(prefill, schedule, concurrency):
    cost = replace(COST, schedule=schedule)
    work = SimulatedWorkload(
        np.full(6, 300), np.arange(20, 80, 10), np.array([0.0, 0.0, 0.01, 0.02, 0.3, 2.0]), concurrency
    )
    later = replace(work, arrivals_s=work.arrivals_s + 64.0, intake=1e-3, latency=1e-3)
    now, then = (
        simulate(cost, CHAIN, each, prefill=prefill, log=True)
        for each in (replace(work, intake=1e-3, latency=1e-3), later)
    )
    assert then.metrics() == pytest.approx(now.metrics(), rel=1e-9)
    assert then.duration == pytest.approx(now.duration)
    assert 2 < now.duration < 3
    for name in ("arrivals", "firsts", "lasts"):
        assert getattr(then, name) == pytest.approx(getattr(now, name) + 64.0)
    assert then.log[0].start == pytest.approx(64.0 + 2e-3)
