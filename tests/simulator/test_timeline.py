"""Limits of a simulated server: queues, mean acceptance, time and memory, refused settings, the slots of a request."""

import signal
from dataclasses import replace

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.acceptance import Option, PerPosition, iid, steady
from specsim.simulator.results import Quantiles
from specsim.simulator.server import round_columns, simulate
from specsim.simulator.workload import SimulatedWorkload, closed_loop, poisson

LLAMA = model("llama-3-8b")
COST = CostModel(hardware("H100-SXM"), LLAMA, drafter("eagle3", LLAMA, 32000), schedule="sync")
CHAIN = SpecConfig(1, 3, 4)
OPTION = Option(CHAIN, PerPosition((0.7, 0.5, 0.3)))
TREE = SpecConfig(2, 3, 6, page_size=4, max_len=64)


class OneSecondRounds:
    def prefill(self, new_tokens, contexts) -> float:
        return 0.0

    def round(self, contexts, config) -> float:
        return 1.0

    def mixed(self, new_tokens, behind, contexts, config) -> float:
        return 1.0


@pytest.mark.parametrize("config", [TREE, CHAIN, replace(TREE, release="round"), SpecConfig(3, 5, 9, page_size=16)])
def test_columns_are_the_servers(config):
    from specsim.core.columns import round_columns as columns_of_one

    lengths = np.arange(1, 70)
    assert round_columns(lengths, config).tolist() == [columns_of_one(int(length), config) for length in lengths]


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_one_place_waits_like_an_md1_queue(busy):
    """With Poisson arrivals and a service time D = 1 s, the mean wait is busy · D / (2 (1 - busy))."""
    load = poisson(10_000, busy, 10, 1 + 4)
    run = simulate(
        OneSecondRounds(), Option(CHAIN, steady(4, 3)), load, ServingConfig("sync", 1, 10**6), prefill="beside"
    )
    assert run.e2e.mean() - 1 == pytest.approx(busy / (2 * (1 - busy)), rel=0.06)


def test_one_place_waits_like_an_mg1_queue():
    """Random rounds S: mean wait λ E[S²] / (2 (1 - λ E[S])), Pollaczek and Khinchine's formula."""
    load = poisson(10_000, 0.1, 10, 1 + 12)
    run = simulate(
        OneSecondRounds(), Option(CHAIN, iid(0.7, 3)), load, ServingConfig("sync", 1, 10**6), prefill="beside"
    )
    rounds = run.rounds.astype(float)
    wait = 0.1 * (rounds**2).mean() / (2 * (1 - 0.1 * rounds.mean()))
    assert run.e2e.mean() - rounds.mean() == pytest.approx(wait, rel=0.06)


def test_independent_acceptance_has_its_mean():
    """Over 1,000 requests of 400 tokens the accept length misses its mean by less than 5 standard errors."""
    run = simulate(OneSecondRounds(), OPTION, closed_loop(1000, 64, 10, 400), prefill="beside")
    assert run.accept_length == pytest.approx(2.5, abs=5 * 1.2 / run.rounds.sum() ** 0.5)


def test_time_and_memory_grow_with_the_work():
    """Twice the requests take twice the steps, and the notes of a round do not outlive it."""
    import tracemalloc

    peaks, steps = [], []
    for count in (1024, 2048):  # accepted drafts are drawn for 1024 requests at once
        load = closed_loop(count, 64, 20, 256)
        tracemalloc.start()
        steps.append(simulate(OneSecondRounds(), OPTION, load, log=False).num_steps)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.1)
    assert peaks[1] - peaks[0] < 1024 * 1100  # bytes a request; its rounds alone would be 8 · 102 · 1024


def test_quantiles_of_many_values_in_little_memory():
    values = np.random.default_rng(0).lognormal(-4, 2, 20_000)
    kept = Quantiles()
    for part in np.split(values, 10):
        kept.add(part, np.ones(len(part), dtype=np.int64))
    assert kept.mean == pytest.approx(values.mean())
    for share in (0, 0.1, 0.5, 0.99, 1):
        assert kept.at(share) == pytest.approx(np.quantile(values, share), rel=0.0014)
    assert np.isnan(Quantiles().at(0.5))


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"prefill": "never"}, "prefill", "never"),
        ({"serving": ServingConfig("overlap")}, "schedule", "overlap"),
        ({"serving": ServingConfig(num_slots=32)}, "num_slots", 32),
        ({"serving": ServingConfig(prefix_cache=True)}, "prefix_cache", True),
        ({"options": (OPTION, Option.plain(page_size=1))}, "options", "2 settings"),
        ({"options": ()}, "options", "0 settings"),
    ],
)
def test_impossible_servers_are_refused(change, name, value):
    arguments = {"options": OPTION, "workload": closed_loop(3, 2, 20, 20), "serving": None} | change
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        simulate(COST, **arguments)


@pytest.fixture
def patience():
    """A run that does not end is interrupted."""

    def interrupt(*_):
        raise TimeoutError("the run does not end")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("prompt", [13, 15, 16, 17])
@pytest.mark.parametrize("output", [1, 2, 3, 5, 20])
def test_a_request_needs_the_slots_of_its_largest_round(prompt, output):
    """Pages of 8, two lanes, release `round`: a round needs 5 pages at 14 tokens, 4 pages at 16."""
    config = SpecConfig(2, 3, 5, page_size=8, release="round")
    option, load = Option(config, iid(0.0, 3)), closed_loop(1, 1, prompt, output)
    most = max(round_columns(np.arange(prompt, prompt + max(1, output - 1)), config))
    slots = int(-(-most // 8) * 8)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("num_slots", slots - 8)):
        simulate(OneSecondRounds(), option, load, ServingConfig(num_slots=slots - 8))
    run = simulate(OneSecondRounds(), option, load, ServingConfig(num_slots=slots))
    assert run.preemptions.sum() == 0


@pytest.mark.parametrize("cached", [[1], [-1, 0], [10, 0], [0.5, 0.5]])
def test_cached_columns_leave_a_token_to_prefill(cached):
    with pytest.raises(InputError, check=lambda error: error.name == "cached_tokens"):
        SimulatedWorkload(np.array([10, 10]), np.array([5, 5]), np.zeros(2), cached_tokens=np.array(cached))
