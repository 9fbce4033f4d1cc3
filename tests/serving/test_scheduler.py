"""The serving loop: arrivals, admission, chunks, ends, aborts, times."""

import re
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from specsim import InputError, SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.correctness.invariance.solo import run_solo
from specsim.models.load import load
from specsim.serving import generation
from specsim.serving.generation import load_engine
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import Chunk

from .settings import CHAIN, LONG, OTHER, SCHEDULES, SHORT, TREE

pytestmark = pytest.mark.usefixtures("inference")


def test_an_id_is_taken_once(make, ask, check_solo):
    scheduler = make()
    scheduler.submit(ask(3))
    with pytest.raises(InputError, check=lambda error: error.name == "request_id"):
        scheduler.submit(ask(3, OTHER))
    scheduler.serve()
    with pytest.raises(InputError, check=lambda error: error.name == "request_id"):
        scheduler.submit(ask(3))
    check_solo(scheduler.requests.values())


@SCHEDULES
@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "reason"),
    [
        (LONG * 4, 4, "a prompt of 80 tokens; at most 63, one less than max_len, can run"),
        (LONG * 2, 24, "40 prompt tokens and 24 new ones need .* slots, and the pool has 80"),
    ],
)
def test_a_prompt_that_can_never_fit_is_rejected_at_arrival(
    make, ask, check_solo, schedule, prompt, max_new_tokens, reason
):
    late = {"arrival": 2}
    scheduler = make(schedule=schedule, num_slots=80)
    scheduler.serve(ask(0), ask(1, prompt, max_new_tokens, schedule=late), ask(2, OTHER, schedule=late))
    refused = scheduler.requests.pop(1)
    assert (refused.finish_reason, refused.token_ids, refused.emissions) == ("rejected", [], [])
    assert re.fullmatch(reason, refused.error)
    assert [record.step for record in scheduler.trace.records if record.rejected] == [2]
    assert 1 not in scheduler.events("admitted")
    check_solo(scheduler.requests.values())


GREEDY = 24  # tokens of the request that the next test cuts short
POSITIONS = (0, 1, 2, 3, 4, 9, 14)


@pytest.fixture(scope="module")
def uncut(ask, pair) -> list[int]:
    return list(run_solo(pair, TREE, ask(0, max_new_tokens=GREEDY)).token_ids)


@SCHEDULES
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("by", ["eos", "stop token", "max_new_tokens", "max_len"])
def test_a_request_ends_also_inside_an_accepted_path(make, ask, check_solo, pair, uncut, by, position, schedule):
    end = uncut.index(uncut[position]) + 1
    config = TREE
    changes = {}
    if by == "eos":
        target_config = replace(pair.target.config, eos_token_ids=(uncut[end - 1],))
        pair = replace(pair, target=replace(pair.target, config=target_config))
    elif by == "stop token":
        changes = {"stop_token_ids": (uncut[end - 1],)}
    elif by == "max_new_tokens":
        changes = {"max_new_tokens": end}
    else:
        config = replace(TREE, max_len=len(SHORT) + end)
    request = ask(0, pair=pair, **{"max_new_tokens": GREEDY, **changes})
    other = ask(1, OTHER, temperature=1.0)
    scheduler = make(config, schedule=schedule).serve(request, other)
    is_stop = by in ("eos", "stop token")
    assert request.token_ids == uncut[:end]
    assert request.finish_reason == ("stop" if is_stop else "length")
    assert request.stop_reason == (uncut[end - 1] if is_stop else None)
    assert sum(request.accepted) + 1 >= end
    assert sum(tokens for _, _, tokens in request.emissions) == end
    check_solo([request], config, pair)
    if other.finish_reason != "rejected":
        check_solo([other], config)
    assert scheduler.requests[0] is request


def test_cuts_fall_after_prefill_inside_and_at_the_end_of_paths(ask, pair, uncut):
    output = run_solo(pair, TREE, ask(0, max_new_tokens=GREEDY))
    after_prefill, *ends = accumulate(output.num_accepted_tokens_per_round, initial=1)
    cuts = {uncut.index(uncut[position]) + 1 for position in POSITIONS}
    assert after_prefill in cuts
    assert cuts & set(ends)
    assert cuts - {after_prefill, *ends}


@SCHEDULES
def test_a_stop_string_ends_a_request_and_its_text(make, ask, schedule):
    pair, config = load(), SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, max_len=128)
    prompt = "def add(a, b):\n    "
    long = generate(
        pair, [prompt], config, SamplingParams(max_new_tokens=24), engine=EngineOptions(dtype=torch.float64)
    ).outputs[0]
    stop = long.text[8:11]
    pattern = f"{re.escape(stop[0])}.{re.escape(stop[2])}"
    request, patterned = ask(0, prompt, 24, pair, stop=(stop,)), ask(1, prompt, 24, pair, stop_regex=("@", pattern))
    engine = load_engine(pair, config, EngineOptions("reference", torch.float64))
    make(engine=engine, schedule=schedule).serve(request, patterned)
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert request.text == long.text[: long.text.index(stop)]
    assert tuple(request.token_ids) == long.token_ids[: len(request.token_ids)]
    assert stop in pair.tokenizer.decode(request.token_ids)
    assert stop not in pair.tokenizer.decode(request.token_ids[:-1])
    assert (patterned.finish_reason, patterned.stop_reason) == ("stop", pattern)
    ends = range(len(long.token_ids) + 1)
    first = next(end for end in ends if re.search(pattern, pair.tokenizer.decode(long.token_ids[:end])))
    assert patterned.text == pair.tokenizer.decode(patterned.token_ids) == pair.tokenizer.decode(long.token_ids[:first])


@SCHEDULES
@pytest.mark.parametrize("when", ["not arrived", "waiting", "in a chunk", "decoding", "finished"])
def test_a_request_can_be_aborted_at_any_moment(make, ask, check_solo, when, schedule):
    """Its tokens are the beginning of its solo run's, and other requests are unaffected."""
    scheduler = make(schedule=schedule, max_running=2, chunk_tokens=8)
    others = [ask(0, OTHER, 10), ask(2, LONG, 6, temperature=1.0)]
    late = {"arrival": 30 if when == "not arrived" else 0}
    victim = ask(1, LONG, 6, schedule=late) if when != "decoding" else ask(1, SHORT, 20, schedule=late)
    scheduler.submit(*((others[0], victim, others[1]) if when != "waiting" else (*others, victim)))
    steps = {"not arrived": 2, "waiting": 2, "in a chunk": 2, "decoding": 5, "finished": 30}[when]
    for _ in range(steps):
        scheduler.step()
    place = {
        "not arrived": victim.arrived is None,
        "waiting": victim.arrived is not None and victim.row < 0,
        "in a chunk": victim.row >= 0 and 0 < scheduler.reservations.committed(victim) < len(LONG),
        "decoding": len(victim.token_ids) > 1 and not victim.finish_reason,
        "finished": victim.finish_reason == "length",
    }
    assert place[when]
    assert scheduler.abort(1) == (when != "finished")
    assert scheduler.abort(1) is False
    assert victim.finish_reason == ("length" if when == "finished" else "abort")
    assert victim.row == -1
    scheduler.pools.audit()
    before = list(victim.token_ids)
    scheduler.run()
    scheduler.close()
    assert victim.token_ids == before
    check_solo([*others, victim])


def test_an_unknown_request_cannot_be_aborted(make):
    assert make().abort(7) is False


def test_aborts_by_the_clock_come_at_their_step(make, ask, check_solo):
    scheduler = make().serve(ask(0, max_new_tokens=20, schedule={"abort_at": 3}), ask(1, max_new_tokens=12))
    assert [record.step for record in scheduler.trace.records if record.aborted] == [3]
    assert scheduler.requests[0].finish_reason == "abort"
    check_solo(scheduler.requests.values())


ORDERS = {  # requests by (fields of their schedules), and the order of admission
    "the highest priority first": ([{"priority": number // 2} for number in range(4)], [2, 3, 0, 1]),
    # The order of submission does not matter, except between requests that arrive together.
    "the first to arrive first": ([{}, {"arrival": 2}, {"arrival": 1}, {"arrival": 1}], [0, 2, 3, 1]),
    # A turn arrives when the one before has ended, although it was due in the first step.
    "a turn after requests that arrived meanwhile": ([{}, {"continues": 0}, {"arrival": 1}], [0, 2, 1]),
}


@SCHEDULES
@pytest.mark.parametrize(("schedules", "order"), ORDERS.values(), ids=ORDERS)
def test_requests_are_admitted_in_their_order(make, ask, schedules, order, schedule):
    requests = [ask(number, max_new_tokens=8 if number else 20, schedule=each) for number, each in enumerate(schedules)]
    assert make(max_running=1, schedule=schedule).serve(*requests).events("admitted") == order


def test_a_pool_has_a_page(make):
    with pytest.raises(InputError, check=lambda error: error.name == "num_slots"):
        make(num_slots=3)


def test_generate_is_one_run_of_a_scheduler(pair, monkeypatch):
    made = []

    class Seen(Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(generation, "Scheduler", Seen)
    options = EngineOptions(dtype=torch.float64)
    result = generate(pair, [LONG, SHORT, OTHER], TREE, SamplingParams(max_new_tokens=9), engine=options)
    (scheduler,) = made
    chunks = tuple(Chunk(number, 0, len(prompt)) for number, prompt in enumerate((LONG, SHORT, OTHER)))
    assert scheduler.trace.records[0].prefilled == chunks
    assert scheduler.trace.records[0].decoded == (0, 1, 2)
    assert not any(record.preempted for record in scheduler.trace.records)
    served = [tuple(each.token_ids) for each in scheduler.requests.values()]
    assert served == [each.token_ids for each in result.outputs]


@pytest.mark.parametrize("reason", ["never closed", "closed under way", "closed twice"])
def test_close_releases_everything(three_running, check_solo, reason):
    scheduler = three_running(prefix_cache=True)
    if reason == "closed twice":
        scheduler.run()
        scheduler.close()
    usage = scheduler.close()
    assert (usage["free"], usage["requests"], usage["cached"]) == (usage["slots"], 0, 0)
    assert not scheduler.is_busy
    check_solo(scheduler.requests.values())


@pytest.mark.parametrize("drive", ["step", "run"])
def test_an_abort_happens_at_its_step_with_any_driver(make, ask, drive):
    """It may precede the arrival, and nothing else may happen in between."""
    scheduler, request = make(), ask(0, schedule={"arrival": 10, "abort_at": 5})
    scheduler.submit(request)
    scheduler.run() if drive == "run" else [scheduler.step() for _ in range(12)]
    assert [record.step for record in scheduler.trace.records if record.aborted] == [5]
    assert request.arrived is None


def test_aborts_by_close_are_recorded(make, ask):
    scheduler = make()
    scheduler.submit(ask(0))
    scheduler.step()
    scheduler.close()
    assert scheduler.trace.counts()["aborted"] == 1


def test_a_request_is_served_once(make, ask):
    request = make().serve(ask(0)).requests[0]
    with pytest.raises(InputError, check=lambda error: error.name == "request"):
        make().submit(request)


@SCHEDULES
def test_a_step_prefills_no_more_than_its_budget_over_all(make, ask, schedule):
    scheduler = make(schedule=schedule, chunk_tokens=5).serve(*(ask(each, LONG[each:]) for each in range(4)))
    chunks = [sum(each.end - each.start for each in record.prefilled) for record in scheduler.trace.records]
    assert max(chunks) == 5
    assert any(len(record.prefilled) > 1 for record in scheduler.trace.records)


@SCHEDULES
def test_no_request_overtakes_one_that_waits_for_slots(make, ask, schedule):
    """A small request that arrives later stays behind a large one of the same priority."""
    running, large, small = ask(0, LONG, 14), ask(1, LONG[::-1], 14), ask(2, [5], 2)
    config = CHAIN.reserved_columns(len(LONG) + 14)
    scheduler = make(CHAIN, schedule=schedule, num_slots=config + 8)
    scheduler.serve(running, large, small)
    assert scheduler.events("admitted")[:3] == [0, 1, 2]
    admitted = {name: r.step for r in scheduler.trace.records for name in r.admitted}
    assert admitted[1] > 0
    assert admitted[2] >= admitted[1]


def test_waiting_for_a_place_counts_towards_the_first_token(make, ask):
    scheduler = make(max_running=1).serve(ask(0, max_new_tokens=14), ask(1))
    assert [request.arrived[0] for request in scheduler.requests.values()] == [0, 0]
    assert scheduler.requests[1].emissions[0][0] > 3


def test_times_are_seconds_since_the_scheduler_was_made(make, ask):
    now = [100.0]
    request = ask(0)
    scheduler = make(clock=lambda: now[0])
    scheduler.submit(request)
    now[0] = 102.5
    assert scheduler.step().seconds == 2.5
    assert request.arrived == (0, 2.5)
    assert [seconds for _, seconds, _ in request.emissions] == [2.5, 2.5]  # of the prompt and of a round
