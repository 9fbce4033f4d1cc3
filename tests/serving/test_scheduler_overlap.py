"""Both schedules: the time at which results are read, and equal tokens under each."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from specsim import InputError, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import DraftInput
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine
from specsim.serving.runner import HostCopy, Launched
from specsim.serving.scheduler import Scheduler

from .settings import LONG, OTHER, SCHEDULES, SHORT, TREE

pytestmark = pytest.mark.usefixtures("inference")


def test_an_abort_drops_the_unread_result(make, ask):
    scheduler = make(schedule="overlap")
    scheduler.submit(victim := ask(0, max_new_tokens=20))
    for _ in range(4):
        scheduler.step()
    launched = scheduler.trace.records[-1].decoded
    before = list(victim.token_ids)
    scheduler.abort(0)
    record = scheduler.step()
    assert launched == (0,)
    assert [(result.request_id, result.num_kept) for result in record.results] == [(0, 0)]
    assert victim.token_ids == before
    assert scheduler.close()["requests"] == 0


@pytest.mark.every_value
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [2, 3])
def test_both_schedules_give_the_same_tokens(make, ask, check_solo, topk, page_size):
    config = SpecConfig(topk=topk, num_steps=3, num_draft_tokens=7, page_size=page_size, max_len=64)
    given = {}
    for schedule in ("sync", "overlap"):
        requests = [
            ask(number, prompt, 7 + number, temperature=number % 2, schedule={"arrival": number})
            for number, prompt in enumerate((LONG, SHORT, OTHER, LONG[:9]))
        ]
        make(config, schedule=schedule, max_running=3, chunk_tokens=9).serve(*requests)
        given[schedule] = [(each.token_ids, each.accepted, each.finish_reason) for each in requests]
        check_solo(requests, config)
    assert given["sync"] == given["overlap"]


class ReadTooEarly(Exception):
    """A result was read before the step had been launched."""


def step_without_reading(scheduler: Scheduler, monkeypatch) -> None:
    """Run a step that may read results only at its end."""

    def refuse(_):
        raise ReadTooEarly

    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "read", refuse)
        patch.setattr(Launched, "read", refuse)
        plan = scheduler.plan()
        if plan.requests:
            scheduler.prefill(plan)
        if scheduler.runner.requests:
            scheduler.decode()
    scheduler.end_step()


def test_overlap_launches_a_step_before_it_reads_the_one_before(make, ask, check_solo, monkeypatch):
    requests = [ask(0, LONG, 9), ask(1, SHORT, 9, schedule={"arrival": 2})]
    scheduler = make(schedule="overlap", chunk_tokens=8)
    scheduler.submit(*requests)
    while scheduler.is_busy:
        step_without_reading(scheduler, monkeypatch)
    check_solo(requests)
    assert all(result.launched == record.step - 1 for record in scheduler.trace.records for result in record.results)


@SCHEDULES
def test_tokens_are_emitted_in_the_step_that_reads_them(make, ask, schedule):
    """Under overlap that is one step after their prefill or round, which the trace names."""
    requests = [ask(0, max_new_tokens=9), ask(1, OTHER, 6, schedule={"arrival": 2})]
    scheduler = make(schedule=schedule).serve(*requests)
    late = int(schedule == "overlap")
    for request in requests:
        own = request.request_id
        steps = [each.step for each in scheduler.trace.records for chunk in each.prefilled if chunk.request_id == own]
        steps += [each.launched for each in scheduler.events("results") if each.request_id == own and each.num_kept]
        assert [emission.step for emission in request.emissions] == [step + late for step in steps]


def test_sync_reads_at_once(make, ask, monkeypatch):
    scheduler = make(schedule="sync")
    scheduler.submit(ask(0))
    with pytest.raises(ReadTooEarly):
        step_without_reading(scheduler, monkeypatch)


@pytest.mark.parametrize(("max_new_tokens", "late"), [(1, 2), (2, 1), (5, 1), (9, 1)])
def test_under_overlap_a_finished_request_is_in_one_more_round(make, ask, check_solo, max_new_tokens, late):
    """A request that finishes with its prefill's token is in the rounds of that step and the next."""
    scheduler = make(schedule="overlap").serve(ask(0, max_new_tokens=max_new_tokens), ask(1, OTHER, 14))
    results = [each for each in scheduler.events("results") if each.request_id == 0]
    assert [result.num_kept for result in results][-late:] == [0] * late
    assert all(result.num_kept for result in results[:-late])
    rounds = [record.step for record in scheduler.trace.records if 0 in record.decoded]
    ended = next(record.step for record in scheduler.trace.records if (0, "length") in record.finished)
    assert max(rounds) == ended
    assert len(scheduler.requests[0].accepted) == len(results) - late
    check_solo(scheduler.requests.values())


def test_under_sync_no_request_is_in_an_unneeded_round(make, ask):
    scheduler = make().serve(ask(0, max_new_tokens=1), ask(1, OTHER, 6))
    assert all(result.num_kept for result in scheduler.events("results"))
    assert 0 not in scheduler.events("decoded")


@SCHEDULES
def test_an_empty_batch_is_idle_and_others_join_it(make, ask, check_solo, schedule, monkeypatch):
    """The last round's state is gone, and new requests are merged with no row."""
    sizes, merge = [], DraftInput.merge

    def seen(self, other):
        sizes.append((self.topk_index.shape[0], other.topk_index.shape[0]))
        return merge(self, other)

    monkeypatch.setattr(DraftInput, "merge", seen)
    requests = [
        ask(number, prompt, 6, schedule={"arrival": 12 * number}) for number, prompt in enumerate((LONG, OTHER))
    ]
    scheduler = make(schedule=schedule)
    scheduler.submit(*requests)
    while not requests[0].finish_reason:
        scheduler.step()
    scheduler.step()
    assert (scheduler.step().decoded, scheduler.runner.requests) == ((), [])
    scheduler.serve()
    assert [size for size in sizes if size[1]] == [(0, 1), (0, 1)]
    check_solo(requests)


def test_overlap_and_release_round_exclude_each_other(make):
    with pytest.raises(InputError, check=lambda error: error.name == "schedule"):
        make(replace(TREE, release="round"), schedule="overlap")


FAST = {
    "tree": SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, max_len=64),
    "chain": SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=1, max_len=64),
    "branchy": SpecConfig(topk=3, num_steps=2, num_draft_tokens=7, page_size=16, max_len=64),
}


@cache
def fast_engine(name: str, graph: str, device: str):
    pair = make_pair("eagle-llama", torch.float32)
    on_gpu = device == "cuda"  # its graphs pad short prompts, and a library then takes another kernel
    options = EngineOptions("fast", torch.float32, device, graph, 3, batch_invariant=on_gpu)
    return load_engine(pair, FAST[name], options)


@pytest.fixture(scope="module")
def bits(make, ask):
    """Compute tokens and logprobs of some of three requests, each with its prompt prefilled in its own call."""
    prompts = ([5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 7, 30])

    def request_of(number: int, arrival: int):
        params = {"temperature": number % 2, "presence_penalty": 0.3 * (number == 2)}
        return ask(number, prompts[number], 5, schedule={"arrival": arrival}, **params)

    def bits(engine, numbers, schedule: str = "sync") -> dict[int, tuple]:
        scheduler = make(engine=engine, schedule=schedule, max_running=3)
        scheduler.serve(*(request_of(number, place) for place, number in enumerate(numbers)))
        assert all(len(record.prefilled) <= 1 for record in scheduler.trace.records)
        return {number: (each.token_ids, each.logprobs, each.accepted) for number, each in scheduler.requests.items()}

    return bits


@pytest.fixture(scope="module")
def expected_bits(bits, device):
    return bits(fast_engine("tree", "eager", device), [0, 1, 2])


@pytest.mark.parametrize(
    "name", ["tree", *(pytest.param(name, marks=pytest.mark.whole) for name in ("chain", "branchy"))]
)
def test_fast_gives_the_bits_of_a_solo_run_in_equal_buffers(bits, name, device):
    """The row does not matter: prompts are prefilled in their own calls, and every round has the bucket's shape."""
    engine = fast_engine(name, "eager", device)
    by_themselves = {number: bits(engine, [number])[number] for number in range(3)}
    for order in ([0, 1, 2], [2, 0, 1]):
        assert bits(engine, order) == by_themselves


GRAPHS = ("eager", "step", "phase", "round")


@pytest.mark.by_default("overlap-eager", "sync-phase", "overlap-round")
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_fast_graph_modes_and_schedules_give_the_same_bits(bits, expected_bits, graph, schedule, device):
    assert bits(fast_engine("tree", graph, device), [0, 1, 2], schedule) == expected_bits


@SCHEDULES
def test_a_scheduler_made_in_inference_mode_works_outside_it(make, ask, schedule):
    """Tests here run inside it."""
    scheduler = make(schedule=schedule)
    scheduler.submit(ask(0, max_new_tokens=30))
    scheduler.step()
    with torch.inference_mode(False):
        scheduler.step()
    scheduler.step()
    with torch.inference_mode(False):
        assert scheduler.abort(0)
        assert scheduler.close()["free"] == scheduler.pools.num_slots


@SCHEDULES
def test_between_steps_no_more_is_committed_than_is_known(make, ask, schedule):
    """Columns of tokens that the host knows are committed.

    The last token is the next round's root.
    """
    scheduler = make(schedule=schedule)
    for request_id in range(3):
        scheduler.submit(ask(request_id, LONG[: 5 * request_id + 3], 12, temperature=1.0))
    while scheduler.is_busy:
        scheduler.step()
        for request in scheduler.runner.requests:
            assert scheduler.reservations.committed(request) == request.prefill_len
