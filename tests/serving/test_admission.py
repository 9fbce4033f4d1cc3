"""Preemption: victims, records of it, and requests that resume."""

from functools import cache

import pytest
import torch

from specsim import InputError, SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.invariance.solo import BUDGETS, difference, run_solo
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import Preemption

TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4, max_len=64)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=1, max_len=64)
BRANCHY = SpecConfig(topk=3, num_steps=2, num_draft_tokens=8, page_size=16, max_len=64)
LONG, SHORT, OTHER = [7 * i % 47 for i in range(20)], [5, 17, 3, 40], [9, 8, 7, 6, 5, 4, 3, 2, 1, 30, 31, 32]
SCHEDULES = pytest.mark.parametrize("schedule", ["sync", "overlap"])


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@cache
def pair_of():
    return make_pair("eagle-noisy")


@cache
def engine_of(config: SpecConfig = TREE):
    return load_engine(pair_of(), config, EngineOptions("reference", torch.float64))


def make(config: SpecConfig = TREE, engine=None, num_slots: int = 1000, **serving) -> Scheduler:
    return Scheduler(engine or engine_of(config), ServingConfig(num_slots=num_slots, **serving), audits=True)


def ask(request_id: int, prompt=SHORT, max_new_tokens: int = 8, pair=None, schedule=None, **params) -> Request:
    pair, params = pair or pair_of(), SamplingParams(max_new_tokens=max_new_tokens, **params)
    return make_request(pair.target.config, pair.tokenizer, request_id, prompt, params, **(schedule or {}))


def serve(scheduler: Scheduler, *requests: Request) -> Scheduler:
    for request in requests:
        scheduler.submit(request)
    scheduler.run()
    scheduler.close()
    return scheduler


def check_alone(requests, config: SpecConfig = TREE, pair=None) -> None:
    """Each gives what it gives by itself."""
    for request in requests:
        output = run_solo(pair or pair_of(), config, request)
        assert difference(request, output, BUDGETS[torch.float64]) is None


def events(scheduler: Scheduler, name: str) -> list:
    return [each for record in scheduler.trace.records for each in getattr(record, name)]


ORDERS = {"latest": [2, 1, 0], "shortest": [1, 2, 0], "longest": [0, 2, 1]}


def three_running(priorities=(0, 0, 0), **serving) -> Scheduler:
    """Requests 0, 1 and 2 arrive in this order and are decoding; 0 is the longest, 1 the shortest."""
    scheduler = make(**serving)
    for request_id, prompt in enumerate((LONG, SHORT, OTHER)):
        schedule = {"arrival": request_id, "priority": priorities[request_id]}
        scheduler.submit(ask(request_id, prompt, 14, schedule=schedule, temperature=1.0))
    for _ in range(4):
        scheduler.step()
    assert not any(request.finish_reason for request in scheduler.requests.values())
    return scheduler


@SCHEDULES
@pytest.mark.parametrize("preemption", ORDERS)
def test_victim_is_as_documented(preemption, schedule):
    scheduler = three_running(preemption=preemption, schedule=schedule)
    usage = scheduler.pools.usage()
    scheduler.limit(usage["slots"] - usage["free"] - TREE.page_size)
    scheduler.step()
    assert [each.request_id for each in events(scheduler, "preempted")] == ORDERS[preemption][:1]
    scheduler.limit(0)
    scheduler.step()
    assert [each.request_id for each in events(scheduler, "preempted")] == ORDERS[preemption]
    scheduler.limit(scheduler.pools.num_slots)
    serve(scheduler)
    assert [request.num_preemptions for request in scheduler.requests.values()] == [1, 1, 1]
    check_alone(scheduler.requests.values())


@pytest.mark.parametrize("preemption", ORDERS)
@pytest.mark.parametrize("lowest", [0, 1, 2])
def test_the_lowest_priority_gives_way_first(preemption, lowest):
    scheduler = three_running([int(number != lowest) for number in range(3)], preemption=preemption)
    scheduler.limit(0)
    scheduler.step()
    expected = sorted(ORDERS[preemption], key=lambda request_id: request_id != lowest)
    assert [each.request_id for each in events(scheduler, "preempted")] == expected


@pytest.mark.parametrize(("chunk", "in_page"), [(6, True), (8, False), (2, True)])
def test_a_preemption_records_the_progress_of_a_request(chunk, in_page):
    scheduler = make(chunk_tokens=chunk)
    scheduler.submit(ask(0, LONG))
    scheduler.step()
    scheduler.limit(0)
    scheduler.step()
    assert events(scheduler, "preempted") == [Preemption(0, chunk, in_page, is_prefilling=True)]


@SCHEDULES
@pytest.mark.parametrize("config", [TREE, CHAIN, BRANCHY], ids=["tree", "chain", "branchy"])
def test_a_resumed_request_draws_nothing_again(config, schedule):
    """Its rounds fall where they would have fallen, and its last token is not delivered twice."""
    scheduler = make(config, schedule=schedule, chunk_tokens=5)
    scheduler.submit(request := ask(0, OTHER, 16, temperature=1.0, presence_penalty=0.5))
    preempted_at = []
    while scheduler.is_busy:
        step = scheduler.step()
        if step.decoded and len(request.token_ids) not in preempted_at and not request.finish_reason:
            preempted_at.append(len(request.token_ids))
            scheduler.limit(0)
            scheduler.step()
            scheduler.limit(scheduler.pools.num_slots)
    assert request.num_preemptions >= 3
    resumed = [record for record in scheduler.trace.records if record.resumed]
    last = len(resumed) - request.num_preemptions  # its last token may have been on its way when it was preempted
    assert last == 0 or (schedule, last) == ("overlap", -1)
    assert len(request.emissions) == 1 + len(request.accepted)
    assert sum(tokens for _, _, tokens in request.emissions) == len(request.token_ids)
    check_alone([request], config)


@SCHEDULES
def test_a_turn_that_is_preempted_goes_on_from_its_own_tokens(schedule):
    """sglang#24859: a streaming session, preempted in its second turn, then continued by a third."""
    scheduler = make(schedule=schedule, max_running=2)
    requests = [
        ask(0, LONG, 5, schedule={"keep": True}),
        ask(1, SHORT, 12, schedule={"continues": 0, "keep": True}, temperature=1.0),
        ask(2, OTHER, 5, schedule={"continues": 1}, temperature=1.0),
        ask(3, OTHER, 14),
    ]
    for request in requests:
        scheduler.submit(request)
    while len(requests[1].token_ids) < 4:
        scheduler.step()
    assert not requests[1].finish_reason
    scheduler.limit(0)
    scheduler.step()
    scheduler.limit(scheduler.pools.num_slots)
    serve(scheduler)
    assert requests[1].num_preemptions == 1
    assert requests[1].num_reused == len(LONG) + 4
    assert requests[2].num_reused == len(requests[1].known_ids) - 1
    check_alone(requests)


@SCHEDULES
def test_a_scheduler_in_which_nothing_can_happen_says_so(schedule):
    """In the first such step, and who is the first that needs more slots; the turn waits for the first to end."""
    turn = ask(2, [1, 2], schedule={"continues": 0, "arrival": 1})
    scheduler, requests = make(schedule=schedule), [ask(0), ask(1, LONG), turn]
    for request in requests:
        scheduler.submit(request)
    scheduler.limit(0)
    with pytest.raises(InputError, check=lambda error: error.name == "limit"):
        scheduler.run()
    assert scheduler.is_stalled
    assert [record.step for record in scheduler.trace.records] == [0, 1]
    scheduler.limit(scheduler.pools.num_slots)
    serve(scheduler)
    check_alone(requests)


@pytest.mark.parametrize("num_slots", [True, 100.0, None, "3", -1, 10**6])
def test_a_limit_is_a_number_of_slots_that_there_are(num_slots):
    with pytest.raises(InputError, check=lambda error: error.name == "num_slots"):
        make().limit(num_slots)


def test_a_waiting_request_can_be_aborted_in_a_stall():
    scheduler, request = make(), ask(0, schedule={"abort_at": 5})
    scheduler.limit(0)
    scheduler.submit(request)
    scheduler.run()
    assert request.finish_reason == "abort"
