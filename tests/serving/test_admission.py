"""Preemption: victims, their records, and requests that resume."""

import pytest

from specsim import InputError
from specsim.serving.trace import Preemption

from .settings import BRANCHY, CHAIN, LONG, OTHER, SCHEDULES, SHORT, TREE

pytestmark = pytest.mark.usefixtures("inference")


ORDERS = {"latest": [2, 1, 0], "shortest": [1, 2, 0], "longest": [0, 2, 1]}


@SCHEDULES
@pytest.mark.parametrize("preemption", ORDERS)
def test_victim_is_as_documented(three_running, check_solo, preemption, schedule):
    scheduler = three_running(preemption=preemption, schedule=schedule)
    usage = scheduler.pools.usage()
    scheduler.limit(usage["slots"] - usage["free"] - TREE.page_size)
    scheduler.step()
    assert [each.request_id for each in scheduler.events("preempted")] == ORDERS[preemption][:1]
    scheduler.limit(0)
    scheduler.step()
    assert [each.request_id for each in scheduler.events("preempted")] == ORDERS[preemption]
    scheduler.limit(scheduler.pools.num_slots)
    scheduler.serve()
    assert [request.num_preemptions for request in scheduler.requests.values()] == [1, 1, 1]
    check_solo(scheduler.requests.values())


@pytest.mark.parametrize("preemption", ORDERS)
@pytest.mark.parametrize("lowest", [0, 1, 2])
def test_the_lowest_priority_is_preempted_first(three_running, preemption, lowest):
    scheduler = three_running([int(number != lowest) for number in range(3)], preemption=preemption)
    scheduler.limit(0)
    scheduler.step()
    expected = sorted(ORDERS[preemption], key=lambda request_id: request_id != lowest)
    assert [each.request_id for each in scheduler.events("preempted")] == expected


@pytest.mark.parametrize(("chunk", "in_page"), [(6, True), (8, False), (2, True)])
def test_a_preemption_records_the_progress_of_a_request(make, ask, chunk, in_page):
    scheduler = make(chunk_tokens=chunk)
    scheduler.submit(ask(0, LONG))
    scheduler.step()
    scheduler.limit(0)
    scheduler.step()
    assert scheduler.events("preempted") == [Preemption(0, chunk, in_page, is_prefilling=True)]


@SCHEDULES
@pytest.mark.parametrize("config", [TREE, CHAIN, BRANCHY], ids=["tree", "chain", "branchy"])
def test_a_resumed_request_draws_nothing_again(make, ask, check_solo, config, schedule):
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
    check_solo([request], config)


@SCHEDULES
def test_a_preempted_turn_continues_from_its_own_tokens(make, ask, check_solo, schedule):
    """sglang#24859: a streaming session is preempted in its second turn, then continued by a third."""
    scheduler = make(schedule=schedule, max_running=2)
    requests = [
        ask(0, LONG, 5, schedule={"keep": True}),
        ask(1, SHORT, 12, schedule={"continues": 0, "keep": True}, temperature=1.0),
        ask(2, OTHER, 5, schedule={"continues": 1}, temperature=1.0),
        ask(3, OTHER, 14),
    ]
    scheduler.submit(*requests)
    while len(requests[1].token_ids) < 4:
        scheduler.step()
    assert not requests[1].finish_reason
    scheduler.limit(0)
    scheduler.step()
    scheduler.limit(scheduler.pools.num_slots)
    scheduler.serve()
    assert requests[1].num_preemptions == 1
    assert requests[1].num_reused == len(LONG) + 4
    assert requests[2].num_reused == len(requests[1].known_ids) - 1
    check_solo(requests)


@SCHEDULES
def test_a_stalled_scheduler_raises_an_error(make, ask, check_solo, schedule):
    """The error comes in the first such step and names the first request that needs more slots."""
    turn = ask(2, [1, 2], schedule={"continues": 0, "arrival": 1})
    scheduler, requests = make(schedule=schedule), [ask(0), ask(1, LONG), turn]
    scheduler.submit(*requests)
    scheduler.limit(0)
    with pytest.raises(InputError, check=lambda error: error.name == "limit"):
        scheduler.run()
    assert scheduler.is_stalled
    assert [record.step for record in scheduler.trace.records] == [0, 1]
    scheduler.limit(scheduler.pools.num_slots)
    scheduler.serve()
    check_solo(requests)


@pytest.mark.parametrize("num_slots", [True, 100.0, None, "3", -1, 10**6])
def test_a_limit_is_a_number_of_slots_that_there_are(make, num_slots):
    with pytest.raises(InputError, check=lambda error: error.name == "num_slots"):
        make().limit(num_slots)


def test_a_waiting_request_can_be_aborted_in_a_stall(make, ask):
    scheduler, request = make(), ask(0, schedule={"abort_at": 5})
    scheduler.limit(0)
    scheduler.submit(request)
    scheduler.run()
    assert request.finish_reason == "abort"


@pytest.fixture
def one_victim(make, ask):
    """Make a large request, preempted in the next step, and a small one that waits and fits within the limit."""

    def start(schedule: str, **place):
        scheduler = make(schedule=schedule, max_running=1)
        small = ask(1, [5], 2, schedule=place)
        scheduler.submit(ask(0, LONG, 14), small)
        for _ in range(2):
            scheduler.step()
        scheduler.limit(scheduler.reservations.least_slots(small))
        return scheduler

    return start


@SCHEDULES
def test_a_step_that_preempts_admits_no_request(one_victim, check_solo, schedule):
    """The victim's results are still unread.

    The request that fits is admitted in the next step.
    """
    scheduler = one_victim(schedule, arrival=1, priority=1)
    records = [scheduler.step() for _ in range(2)]
    assert [each.request_id for each in records[0].preempted] == [0]
    assert [record.admitted for record in records] == [(), (1,)]
    scheduler.limit(scheduler.pools.num_slots)
    check_solo(scheduler.serve().requests.values())


@SCHEDULES
def test_a_victim_stays_ahead_of_requests_that_waited(one_victim, check_solo, schedule):
    """A small request that fits never overtakes a large one that arrived before it."""
    scheduler = one_victim(schedule)
    records = [scheduler.step() for _ in range(3)]
    assert [each.request_id for each in records[0].preempted] == [0]
    assert [record.admitted for record in records] == [()] * 3
    scheduler.limit(scheduler.pools.num_slots)
    assert scheduler.serve().events("admitted") == [0, 0, 1]
    check_solo(scheduler.requests.values())
