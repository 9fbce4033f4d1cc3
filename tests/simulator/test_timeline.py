"""The timeline, compared with identities of queueing theory."""

import signal
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.acceptance import Mixture, Option, PerPosition, iid, steady
from specsim.simulator.results import Quantiles
from specsim.simulator.server import round_columns, simulate
from specsim.simulator.workload import SimulatedWorkload, closed_loop, poisson

LLAMA = model("llama-3-8b")
COST = CostModel(hardware("H100-SXM"), LLAMA, drafter("eagle3", LLAMA, 32000), schedule="sync")
CHAIN = SpecConfig(1, 3, 4)
OPTION = Option(CHAIN, PerPosition((0.7, 0.5, 0.3)))
TREE = SpecConfig(2, 3, 6, page_size=4, max_len=64)


@dataclass(frozen=True)
class Linear:
    """A round takes a second plus a time per token and request; a prefill takes a time per token."""

    base: float = 1.0
    request: float = 0.0
    token: float = 0.0

    def prefill(self, new_tokens, contexts) -> float:
        return self.token * float(new_tokens.sum())

    def round(self, contexts, config) -> float:
        return self.base + self.request * len(contexts)

    def mixed(self, new_tokens, behind, contexts, config) -> float:
        return self.round(contexts, config) + self.prefill(new_tokens, behind)


@pytest.mark.parametrize("config", [TREE, CHAIN, replace(TREE, release="round"), SpecConfig(3, 5, 9, page_size=16)])
def test_columns_are_the_servers(config):
    from specsim.core.columns import round_columns as columns_of_one

    lengths = np.arange(1, 70)
    assert round_columns(lengths, config).tolist() == [columns_of_one(int(length), config) for length in lengths]


def arriving(seconds, prompt: int, output: int) -> SimulatedWorkload:
    """Requests of equal lengths that arrive at these seconds."""
    return SimulatedWorkload(
        np.full(len(seconds), prompt), np.full(len(seconds), output), np.array(seconds, dtype=float)
    )


def everything(prefill: str, schedule: str, seed: int = 0):
    """A run with queues, prefill chunks, preemption and two kinds of requests."""
    mixture = Mixture((iid(0.9, 3), iid(0.3, 3)), (1.0, 2.0))
    workload = poisson(200, 60.0, (20, 400), (1, 200), seed=seed)
    serving = ServingConfig(schedule, 32, 7008, chunk_tokens=512)
    cost = replace(COST, schedule=schedule)
    return simulate(cost, Option(CHAIN, mixture), workload, serving, prefill=prefill, seed=seed, log=True)


once = cache(everything)
KINDS = pytest.mark.parametrize("prefill", ["mixed", "beside", "first"])
SCHEDULES = pytest.mark.parametrize("schedule", ["sync", "overlap"])


@KINDS
@SCHEDULES
def test_tokens_are_conserved(prefill, schedule):
    """Tokens of rounds and first tokens sum to the output, except tokens after a request's end."""
    run = once(prefill, schedule)
    made = 1 + run.rounds + run.drafts
    beyond = made - run.output_tokens
    assert (beyond >= 0).all()
    assert (beyond <= np.where(run.output_tokens > 1, 3, 0)).all()
    assert run.preemptions.sum() > 0
    filled = run.prompt_tokens.sum()
    assert sum(step.prompt_tokens for step in run.log) >= filled  # and again after a preemption
    assert sum(int(counts.sum()) for counts in run.accepted_drafts) == run.rounds.sum()
    assert (run.arrivals <= run.firsts).all()
    assert (run.firsts <= run.lasts).all()
    assert max(step.pages for step in run.log) * CHAIN.page_size <= 7008
    assert max(step.running for step in run.log) <= 32


@KINDS
@SCHEDULES
def test_littles_law(prefill, schedule):
    """Requests in the system on average, counted at every instant, are arrival rate times mean stay."""
    run = once(prefill, schedule)
    changes = np.concatenate([run.arrivals, run.lasts])
    order = np.argsort(changes, kind="stable")
    inside = np.cumsum(np.repeat([1, -1], len(run.arrivals))[order])[:-1]
    average = (inside * np.diff(changes[order])).sum() / run.duration
    assert average == pytest.approx(len(run.arrivals) / run.duration * run.e2e.mean())
    # The server's own count of those that have or want a place, step by step, lies where its clock allows.
    busy = sum(step.seconds * (step.running + step.waiting) for step in run.log) / run.duration
    assert busy <= average * 1.001
    assert busy > 0.5 * average


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_one_place_waits_like_an_md1_queue(busy):
    """With Poisson arrivals and a service time D = 1 s, the mean wait is busy · D / (2 (1 - busy))."""
    load = poisson(10_000, busy, 10, 1 + 4)
    run = simulate(Linear(), Option(CHAIN, steady(4, 3)), load, ServingConfig("sync", 1, 10**6), prefill="beside")
    assert run.e2e.mean() - 1 == pytest.approx(busy / (2 * (1 - busy)), rel=0.06)


def test_one_place_waits_like_an_mg1_queue():
    """Random rounds S: mean wait λ E[S²] / (2 (1 - λ E[S])), Pollaczek and Khinchine's formula."""
    load = poisson(10_000, 0.1, 10, 1 + 12)
    run = simulate(Linear(), Option(CHAIN, iid(0.7, 3)), load, ServingConfig("sync", 1, 10**6), prefill="beside")
    rounds = run.rounds.astype(float)
    wait = 0.1 * (rounds**2).mean() / (2 * (1 - 0.1 * rounds.mean()))
    assert run.e2e.mean() - rounds.mean() == pytest.approx(wait, rel=0.06)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_constant_acceptance_has_a_closed_form(length):
    """c requests of 1 + n tokens take n / length rounds in waves of c."""
    option = Option(CHAIN, steady(length, 3))
    load = closed_loop(64, 8, 10, 1 + 24)
    serving = ServingConfig("sync", 8, 10**6)
    run = simulate(Linear(), option, load, serving, prefill="beside")
    assert np.allclose(run.e2e, 24 / length)
    assert run.duration == pytest.approx(8 * 24 / length)
    metrics = run.metrics()
    assert metrics["Output Throughput (tok/s)"] == pytest.approx(64 * 25 / (8 * 24 / length))
    assert metrics["Mean TPOT (ms)"] == pytest.approx(1000 / length)
    assert metrics["P99 ITL (ms)"] == metrics["Median ITL (ms)"] == pytest.approx(1000)
    assert metrics["Spec Decode Accept Length"] == length
    assert metrics["Mean TTFT (ms)"] == pytest.approx(0)


def test_independent_acceptance_has_its_mean():
    """Over 1,000 requests of 400 tokens the accept length misses its mean by less than 5 standard errors."""
    run = simulate(Linear(), OPTION, closed_loop(1000, 64, 10, 400), prefill="beside")
    assert run.accept_length == pytest.approx(2.5, abs=5 * 1.2 / run.rounds.sum() ** 0.5)


def test_a_setting_accepts_no_more_than_its_steps():
    option = Option(SpecConfig(1, 2, 3), iid(0.8, 5))
    assert option.accept_length == pytest.approx(1 + 0.8 + 0.64)
    run = simulate(Linear(), option, closed_loop(500, 64, 10, 400), prefill="beside")
    assert run.accept_length == pytest.approx(option.accept_length, abs=5 * 0.8 / run.rounds.sum() ** 0.5)


def test_overlap_wastes_one_round_of_every_request():
    load, option = closed_loop(1, 1, 10, 9), Option(CHAIN, steady(4, 3))
    steps = {}
    for schedule in ("sync", "overlap"):
        run = simulate(Linear(), option, load, ServingConfig(schedule, 1, 1000), prefill="mixed")
        steps[schedule] = run.num_steps
        assert run.e2e.tolist() == [3.0]  # a prefill and two rounds
    assert steps == {"sync": 3, "overlap": 4}


def test_prefill_modes_delay_first_tokens_as_described():
    cost, option = Linear(token=0.01), Option(CHAIN, steady(1, 3))
    load = arriving([0, 2.5], 100, 10)
    waits = {}
    for prefill in ("mixed", "beside", "first"):
        run = simulate(cost, option, load, ServingConfig("sync", 8, 10**4), prefill=prefill, log=True)
        waits[prefill] = run.ttft.round(9).tolist()
    # A prompt is 1 s of work: with that of a round, or by itself. The second arrives half a second into a round.
    assert waits == {"mixed": [2.0, 2.5], "beside": [1.0, 1.5], "first": [1.0, 1.5]}


@pytest.mark.parametrize("field", ["bandwidth", "peak_flops"])
@KINDS
def test_better_hardware_serves_more(field, prefill):
    load = closed_loop(100, 32, (50, 300), (20, 120))
    runs = []
    for factor in (1, 1.5, 3):
        better = getattr(COST.hardware, field)
        better = {kind: rate * factor for kind, rate in better.items()} if field == "peak_flops" else better * factor
        cost = replace(COST, hardware=replace(COST.hardware, **{field: better}))
        runs.append(simulate(cost, OPTION, load, prefill=prefill).duration)
    assert runs == sorted(runs, reverse=True)
    assert runs[0] > runs[-1]


def test_more_acceptance_serves_more():
    load = closed_loop(100, 32, (50, 300), (20, 120))
    runs = [simulate(COST, Option(CHAIN, iid(rate, 3)), load).duration for rate in (0, 0.3, 0.6, 0.9, 1)]
    assert runs == sorted(runs, reverse=True)


@KINDS
def test_equal_seeds_give_equal_tables(prefill):
    first, again, other = (everything(prefill, "overlap", seed) for seed in (1, 1, 2))
    for name in ("arrivals", "prompt_tokens", "output_tokens", "firsts", "lasts", "rounds", "drafts", "preemptions"):
        assert (getattr(first, name) == getattr(again, name)).all()
    assert first.log == again.log
    assert first.metrics() == again.metrics()
    assert (first.lasts != other.lasts).any()


@KINDS
@SCHEDULES
@pytest.mark.parametrize("option", [OPTION, Option.plain(1)])
def test_rounds_known_before_are_the_same_run(prefill, schedule, option):
    """A log has every round read by request; without one the rounds of a request are known from its beginning."""
    cost = replace(COST, schedule=schedule)
    for workload in (poisson(90, 80.0, (20, 400), (1, 60), seed=3), closed_loop(60, 7, (5, 90), (1, 4))):
        serving = ServingConfig(schedule, 24, 2**20, chunk_tokens=300)
        logged, run = (simulate(cost, option, workload, serving, prefill=prefill, log=log) for log in (True, False))
        for name in ("arrivals", "firsts", "lasts", "first_steps", "last_steps", "rounds", "drafts", "preemptions"):
            assert getattr(run, name).tolist() == getattr(logged, name).tolist()
        assert str(run.metrics()) == str(logged.metrics())
        assert [counts.tolist() for counts in run.accepted_drafts] == [
            counts.tolist() for counts in logged.accepted_drafts
        ]
        assert (logged.preemptions == 0).all()


def test_a_client_sends_no_more_than_it_may():
    load = poisson(300, 500.0, 20, 40)
    limited = SimulatedWorkload(load.prompt_tokens, load.output_tokens, load.arrivals_s, concurrency=5)
    run = simulate(COST, OPTION, limited)
    ends = np.sort(run.lasts)
    under_way = np.arange(1, 301) - np.searchsorted(ends, np.sort(run.arrivals), side="right")
    assert under_way.max() == 5
    assert (run.arrivals >= load.arrivals_s).all()


def test_a_front_end_takes_requests_in_one_by_one():
    cost = Linear(base=0.125)
    run = simulate(cost, OPTION, replace(arriving([0] * 5, 10, 1), intake=0.5), prefill="beside")
    assert run.ttft.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    run = simulate(cost, OPTION, replace(arriving([0] * 3, 10, 1), intake=0.5, latency=0.25), prefill="beside")
    assert run.ttft.tolist() == [0.75, 1.25, 1.75]


def test_time_and_memory_grow_with_the_work():
    """Twice the requests take twice the steps, and the notes of a round do not outlive it."""
    import tracemalloc

    peaks, steps = [], []
    for count in (1024, 2048):  # accepted drafts are drawn for 1024 requests at once
        load = closed_loop(count, 64, 20, 512)
        tracemalloc.start()
        steps.append(simulate(Linear(), OPTION, load, log=False).num_steps)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.1)
    assert peaks[1] - peaks[0] < 1024 * 1100  # bytes a request; its rounds alone would be 8 · 205 · 1024


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
        simulate(Linear(), option, load, ServingConfig(num_slots=slots - 8))
    run = simulate(Linear(), option, load, ServingConfig(num_slots=slots))
    assert run.preemptions.sum() == 0


def test_an_option_needs_acceptance_of_all_its_steps():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("acceptance", 2)):
        Option(CHAIN, iid(0.5, 2))


@pytest.mark.parametrize("prefill", ["mixed", "beside", "first"])
def test_cached_columns_are_not_prefilled(prefill):
    """A second per prompt token: TTFT is what the cache lacks. A preempted request computes all of its columns."""
    prompts, outputs, cached = np.array([40, 40, 40]), np.array([3, 3, 3]), np.array([0, 32, 39])
    work = SimulatedWorkload(prompts, outputs, np.array([0.0, 1000.0, 2000.0]), cached_tokens=cached)
    serving = ServingConfig("sync", 4, 10_000)
    run = simulate(Linear(base=0.0, token=1.0), Option.plain(), work, serving, prefill=prefill, log=True)
    assert run.ttft.tolist() == [40.0, 8.0, 1.0]
    assert sum(step.prompt_tokens for step in run.log) == 49


def test_a_preempted_request_computes_its_cached_columns_again():
    work = SimulatedWorkload(np.array([10, 10]), np.array([30, 30]), np.zeros(2), cached_tokens=np.array([0, 8]))
    slots = 2 * (10 + 30)
    full = simulate(Linear(), Option.plain(1), work, ServingConfig("sync", 2, slots), prefill="beside", log=True)
    assert (full.preemptions.sum(), sum(step.prompt_tokens for step in full.log)) == (0, 12)
    tight = simulate(Linear(), Option.plain(1), work, ServingConfig("sync", 2, 60), prefill="beside", log=True)
    assert tight.preemptions.sum() == 1
    again = sum(step.prompt_tokens for step in tight.log) - 12
    assert 20 < again <= 40


@pytest.mark.parametrize("cached", [[1], [-1, 0], [10, 0], [0.5, 0.5]])
def test_cached_columns_leave_a_token_to_prefill(cached):
    with pytest.raises(InputError, check=lambda error: error.name == "cached_tokens"):
        SimulatedWorkload(np.array([10, 10]), np.array([5, 5]), np.zeros(2), cached_tokens=np.array(cached))
