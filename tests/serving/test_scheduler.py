"""The serving loop, one situation after the other: who comes in, who ends and how, who gives way, what is read when."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import pytest
import torch

from specsim import InputError, SamplingParams, SpecConfig, generate
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import DraftInput
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.invariance.solo import BUDGETS, difference, run_solo
from specsim.models.load import load
from specsim.serving import generation
from specsim.serving.generation import load_engine
from specsim.serving.ranks import Ranks
from specsim.serving.requests import Request, make_request
from specsim.serving.runner import HostCopy, Launched
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import Chunk, Preemption

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


def test_an_id_is_taken_once():
    scheduler = make()
    scheduler.submit(ask(3))
    with pytest.raises(InputError, check=lambda error: error.name == "request_id"):
        scheduler.submit(ask(3, OTHER))
    serve(scheduler)
    with pytest.raises(InputError, check=lambda error: error.name == "request_id"):
        scheduler.submit(ask(3))
    check_alone(scheduler.requests.values())


def test_a_turn_follows_a_request_that_is_there():
    with pytest.raises(InputError, check=lambda error: error.name == "continues"):
        make().submit(ask(5, schedule={"continues": 4}))


@SCHEDULES
@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "reason"),
    [
        (LONG * 4, 4, "a prompt of 80 tokens; at most 63, one less than max_len, can run"),
        (LONG * 2, 24, "40 prompt tokens and 24 new ones need .* slots, and the pool has 80"),
    ],
)
def test_a_prompt_that_can_never_fit_is_rejected_at_arrival(schedule, prompt, max_new_tokens, reason):
    late = {"arrival": 2}
    scheduler = make(schedule=schedule, num_slots=80)
    serve(scheduler, ask(0), ask(1, prompt, max_new_tokens, schedule=late), ask(2, OTHER, schedule=late))
    refused = scheduler.requests.pop(1)
    assert (refused.finish_reason, refused.token_ids, refused.emissions) == ("rejected", [], [])
    assert re.fullmatch(reason, refused.error)
    assert [record.step for record in scheduler.trace.records if record.rejected] == [2]
    assert 1 not in events(scheduler, "admitted")
    check_alone(scheduler.requests.values())


def test_a_turn_of_a_rejected_request_is_rejected():
    requests = [ask(0, LONG * 4), ask(1, schedule={"continues": 0}), ask(2, schedule={"continues": 1}), ask(3)]
    serve(make(), *requests)
    assert [request.finish_reason for request in requests] == ["rejected"] * 3 + ["length"]
    assert requests[1].error == "request 0, which it continues, was rejected"
    assert requests[2].error == "request 1, which it continues, was rejected"


def test_a_turn_without_room_for_its_conversation_is_rejected():
    requests = [ask(0, LONG * 2, 20), ask(1, SHORT, schedule={"continues": 0})]
    serve(make(), *requests)
    assert (requests[0].finish_reason, requests[1].finish_reason) == ("length", "rejected")
    assert requests[1].error.startswith("a prompt of 64 tokens; at most 63")


GREEDY = 24  # tokens of the request that the next test cuts short
POSITIONS = (0, 1, 2, 3, 4, 9, 14)


@cache
def uncut() -> list[int]:
    return list(run_solo(pair_of(), TREE, ask(0, max_new_tokens=GREEDY)).token_ids)


@SCHEDULES
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("by", ["eos", "stop token", "max_new_tokens", "max_len"])
def test_a_request_ends_also_inside_an_accepted_path(by, position, schedule):
    end = uncut().index(uncut()[position]) + 1
    pair, config, changes = pair_of(), TREE, {}
    if by == "eos":
        pair = replace(
            pair, target=replace(pair.target, config=replace(pair.target.config, eos_token_ids=(uncut()[end - 1],)))
        )
    elif by == "stop token":
        changes = {"stop_token_ids": (uncut()[end - 1],)}
    elif by == "max_new_tokens":
        changes = {"max_new_tokens": end}
    else:
        config = replace(TREE, max_len=len(SHORT) + end)
    request = ask(0, pair=pair, **{"max_new_tokens": GREEDY, **changes})
    other = ask(1, OTHER, temperature=1.0)
    scheduler = serve(make(config, schedule=schedule), request, other)
    is_stop = by in ("eos", "stop token")
    assert request.token_ids == uncut()[:end]
    assert request.finish_reason == ("stop" if is_stop else "length")
    assert request.stop_reason == (uncut()[end - 1] if is_stop else None)
    assert sum(request.accepted) + 1 >= end
    assert sum(tokens for _, _, tokens in request.emissions) == end
    check_alone([request], config, pair)
    if other.finish_reason != "rejected":
        check_alone([other], config)
    assert scheduler.requests[0] is request


def test_cuts_fall_after_prefill_inside_and_at_the_end_of_paths():
    output = run_solo(pair_of(), TREE, ask(0, max_new_tokens=GREEDY))
    after_prefill, *ends = accumulate(output.num_accepted_tokens_per_round, initial=1)
    cuts = {uncut().index(uncut()[position]) + 1 for position in POSITIONS}
    assert after_prefill in cuts
    assert cuts & set(ends)
    assert cuts - {after_prefill, *ends}


@SCHEDULES
def test_a_stop_string_ends_a_request_and_its_text(schedule):
    pair, config = load(), SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, max_len=128)
    prompt = "def add(a, b):\n    "
    long = generate(
        pair, [prompt], config, SamplingParams(max_new_tokens=24), engine=EngineOptions(dtype=torch.float64)
    ).outputs[0]
    stop = long.text[8:11]
    request = ask(0, prompt, 24, pair, stop=(stop,))
    engine = load_engine(pair, config, EngineOptions("reference", torch.float64))
    serve(make(engine=engine, schedule=schedule), request)
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert request.text == long.text[: long.text.index(stop)]
    assert tuple(request.token_ids) == long.token_ids[: len(request.token_ids)]
    assert stop in pair.tokenizer.decode(request.token_ids)
    assert stop not in pair.tokenizer.decode(request.token_ids[:-1])


@SCHEDULES
@pytest.mark.parametrize("when", ["not arrived", "waiting", "in a chunk", "decoding", "finished"])
def test_a_request_can_be_aborted_at_any_moment(when, schedule):
    """In its place: what it has is the beginning of what it gives alone; the others do not notice."""
    scheduler = make(schedule=schedule, max_running=2, chunk_tokens=8)
    others = [ask(0, OTHER, 10), ask(2, LONG, 6, temperature=1.0)]
    late = {"arrival": 30 if when == "not arrived" else 0}
    victim = ask(1, LONG, 6, schedule=late) if when != "decoding" else ask(1, SHORT, 20, schedule=late)
    for request in (others[0], victim, others[1]) if when != "waiting" else (*others, victim):
        scheduler.submit(request)
    steps = {"not arrived": 2, "waiting": 2, "in a chunk": 2, "decoding": 5, "finished": 30}[when]
    for _ in range(steps):
        scheduler.step()
    place = {
        "not arrived": victim.arrived is None,
        "waiting": victim.arrived is not None and victim.row < 0,
        "in a chunk": victim.row >= 0 and 0 < scheduler.residents.committed(victim) < len(LONG),
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
    check_alone([*others, victim])


def test_an_abort_drops_the_result_that_is_under_way():
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


def test_nobody_is_aborted_who_was_never_there():
    assert make().abort(7) is False


def test_aborts_by_the_clock_come_at_their_step():
    scheduler = serve(make(), ask(0, max_new_tokens=20, schedule={"abort_at": 3}), ask(1, max_new_tokens=12))
    assert [record.step for record in scheduler.trace.records if record.aborted] == [3]
    assert scheduler.requests[0].finish_reason == "abort"
    check_alone(scheduler.requests.values())


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
def test_the_highest_priority_is_served_first(schedule):
    requests = [ask(request_id, schedule={"priority": request_id // 2}) for request_id in range(4)]
    scheduler = serve(make(max_running=1, schedule=schedule), *requests)
    assert events(scheduler, "admitted") == [2, 3, 0, 1]


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


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [2, 3])
def test_both_schedules_give_the_same(topk, page_size):
    config = SpecConfig(topk=topk, num_steps=3, num_draft_tokens=7, page_size=page_size, max_len=64)
    given = {}
    for schedule in ("sync", "overlap"):
        requests = [
            ask(number, prompt, 7 + number, temperature=number % 2, schedule={"arrival": number})
            for number, prompt in enumerate((LONG, SHORT, OTHER, LONG[:9]))
        ]
        serve(make(config, schedule=schedule, max_running=3, chunk_tokens=9), *requests)
        given[schedule] = [(each.token_ids, each.accepted, each.finish_reason) for each in requests]
        check_alone(requests, config)
    assert given["sync"] == given["overlap"]


def step_without_reading(scheduler: Scheduler, monkeypatch) -> None:
    """A step that may read results at its end only."""

    def refuse(_):
        raise AssertionError("a result was read before the step had been launched")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "read", refuse)
        patch.setattr(Launched, "read", refuse)
        plan = scheduler.plan()
        if plan.requests:
            scheduler.prefill(plan)
        if scheduler.runner.requests:
            scheduler.decode()
    scheduler.end_step()


def test_overlap_launches_a_step_before_it_reads_the_one_before(monkeypatch):
    requests = [ask(0, LONG, 9), ask(1, SHORT, 9, schedule={"arrival": 2})]
    scheduler = make(schedule="overlap", chunk_tokens=8)
    for request in requests:
        scheduler.submit(request)
    while scheduler.is_busy:
        step_without_reading(scheduler, monkeypatch)
    check_alone(requests)
    assert all(result.launched == record.step - 1 for record in scheduler.trace.records for result in record.results)


def test_sync_reads_at_once(monkeypatch):
    scheduler = make(schedule="sync")
    scheduler.submit(ask(0))
    with pytest.raises(AssertionError, match="a result was read before"):
        step_without_reading(scheduler, monkeypatch)


@pytest.mark.parametrize(("max_new_tokens", "late"), [(1, 2), (2, 1), (5, 1), (9, 1)])
def test_under_overlap_a_finished_request_is_in_one_more_round(max_new_tokens, late):
    """Who finishes with the token of its prefill is in the round of that step and in the next."""
    scheduler = serve(make(schedule="overlap"), ask(0, max_new_tokens=max_new_tokens), ask(1, OTHER, 14))
    results = [each for each in events(scheduler, "results") if each.request_id == 0]
    assert [result.num_kept for result in results][-late:] == [0] * late
    assert all(result.num_kept for result in results[:-late])
    rounds = [record.step for record in scheduler.trace.records if 0 in record.decoded]
    ended = next(record.step for record in scheduler.trace.records if (0, "length") in record.finished)
    assert max(rounds) == ended
    assert len(scheduler.requests[0].accepted) == len(results) - late
    check_alone(scheduler.requests.values())


def test_under_sync_nobody_is_in_a_round_in_vain():
    scheduler = serve(make(), ask(0, max_new_tokens=1), ask(1, OTHER, 6))
    assert all(result.num_kept for result in events(scheduler, "results"))
    assert 0 not in events(scheduler, "decoded")


@SCHEDULES
def test_an_empty_batch_is_idle_and_others_join_it(schedule, monkeypatch):
    """The state of the last round is not there any more: what joins is merged with no row."""
    sizes, merge = [], DraftInput.merge

    def seen(self, other):
        sizes.append((self.topk_index.shape[0], other.topk_index.shape[0]))
        return merge(self, other)

    monkeypatch.setattr(DraftInput, "merge", seen)
    requests = [
        ask(number, prompt, 6, schedule={"arrival": 12 * number}) for number, prompt in enumerate((LONG, OTHER))
    ]
    scheduler = make(schedule=schedule)
    for request in requests:
        scheduler.submit(request)
    while not requests[0].finish_reason:
        scheduler.step()
    scheduler.step()
    assert (scheduler.step().decoded, scheduler.runner.requests) == ((), [])
    serve(scheduler)
    assert [size for size in sizes if size[1]] == [(0, 1), (0, 1)]
    check_alone(requests)


def counting(calls: Counter):
    """An engine of its own whose prefills and rounds are counted, and how many of them are of nobody."""
    engine = load_engine(pair_of(), TREE, EngineOptions("reference", torch.float64))

    def counted(name, act, batch, *args, **kwargs):
        calls.update([name, *([f"{name} of nobody"] if batch.size == 0 else [])])
        return act(batch, *args, **kwargs)

    for name in ("prefill", "round"):
        setattr(engine, name, partial(counted, name, getattr(engine, name)))
    return engine


@SCHEDULES
def test_ranks_pass_through_every_phase_together(schedule):
    """In each step as many prefills and rounds in every rank, also in one with nothing to do."""
    calls = [Counter() for _ in range(3)]
    serving = {"schedule": schedule, "chunk_tokens": 7, "max_running": 2}
    ranks = Ranks([make(engine=counting(each), **serving) for each in calls])
    requests = [
        ask(number, prompt, size, schedule={"arrival": arrival}, temperature=number % 2)
        for number, (prompt, size, arrival) in enumerate(
            [(LONG, 3, 0), (SHORT, 12, 0), (OTHER, 2, 1), (SHORT, 2, 9), (LONG, 9, 16), (OTHER, 1, 17)]
        )
    ]
    for request in requests:
        ranks.submit(request)
    while ranks.is_busy:
        before = [each.copy() for each in calls]
        records = ranks.step()
        for name, work in (("prefill", "prefilled"), ("round", "decoded")):
            passed = [each[name] - old[name] for each, old in zip(calls, before, strict=True)]
            assert passed == [int(any(getattr(record, work) for record in records))] * 3
    assert all(each["round of nobody"] and each["prefill of nobody"] for each in calls)
    assert {len(scheduler.requests) for scheduler in ranks.schedulers} == {2}
    for scheduler in ranks.schedulers:
        scheduler.close()
    check_alone(requests)


def test_a_conversation_stays_on_its_rank():
    ranks = Ranks([make(), make()])
    first, turn = ask(0, schedule={"keep": True}), ask(3, schedule={"continues": 0})
    requests = [first, ask(1, OTHER, 16), ask(2, OTHER, 16), turn]
    for request in requests:
        ranks.submit(request)
    ranks.run()
    assert ranks.home[3] is ranks.home[0]
    assert turn.num_reused == len(first.prompt_ids) + 7
    check_alone(requests)


@pytest.mark.parametrize(("release", "schedule"), [("finish", "sync"), ("finish", "overlap"), ("round", "sync")])
@pytest.mark.parametrize("pressure", [False, True])
def test_a_turn_starts_from_what_its_conversation_left(pressure, release, schedule):
    """And computes all of it again where that had to give way."""
    config = replace(TREE, release=release)
    scheduler = make(config, schedule=schedule)
    scheduler.submit(first := ask(0, LONG, 7, schedule={"keep": True}))
    scheduler.run()
    assert scheduler.pools.usage()["requests"] == 1
    if pressure:
        scheduler.limit(config.reserved_columns(len(SHORT) + 8))
        scheduler.submit(other := ask(1, SHORT, 6))
        scheduler.run()
        assert other.finish_reason == "length"
        assert scheduler.pools.usage()["requests"] == 0
        scheduler.limit(scheduler.pools.num_slots)
    scheduler.submit(turn := ask(2, OTHER[:3], 7, schedule={"continues": 0}, temperature=1.0))
    scheduler.run()
    scheduler.close()
    assert turn.prompt_ids == LONG + first.token_ids + OTHER[:3]
    assert turn.num_reused == (0 if pressure else len(LONG) + 6)
    check_alone([first, turn], config)


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
@pytest.mark.parametrize("config", [TREE, CHAIN, BRANCHY], ids=["tree", "chain", "branchy"])
def test_prefixes_are_reused_and_nothing_else_changes(config, schedule):
    tokens, prefilled = {}, {}
    prompts = [LONG + SHORT, LONG + SHORT, LONG + OTHER, LONG[:18] + OTHER, SHORT]
    for prefix_cache in (False, True):
        requests = [
            ask(number, prompt, 6, schedule={"arrival": 3 * number}, temperature=number % 2, presence_penalty=0.5)
            for number, prompt in enumerate(prompts)
        ]
        scheduler = serve(make(config, schedule=schedule, prefix_cache=prefix_cache), *requests)
        tokens[prefix_cache] = [(each.token_ids, each.accepted) for each in requests]
        prefilled[prefix_cache] = scheduler.trace.counts()["num_prefilled"]
        assert sum(request.num_reused for request in requests) == scheduler.trace.counts()["num_reused"]
        assert prefilled[prefix_cache] + scheduler.trace.counts()["num_reused"] == sum(map(len, prompts))
        check_alone(requests, config)
    assert tokens[False] == tokens[True]
    assert prefilled[False] == sum(map(len, prompts))
    # A draft slot holds the token after it, so the last token that two have in common is not in a shared page.
    assert prefilled[False] - prefilled[True] == sum(
        shared // config.page_size * config.page_size for shared in (23, 19, 17)
    )


def test_ranks_say_so_where_one_of_them_can_go_on_no_more():
    ranks = Ranks([make(), make()])
    for number in range(2):
        ranks.submit(ask(number))
    ranks.schedulers[0].limit(0)
    with pytest.raises(InputError, check=lambda error: error.name == "limit"):
        ranks.run()


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


def test_overlap_and_release_round_exclude_each_other():
    with pytest.raises(InputError, check=lambda error: error.name == "schedule"):
        make(replace(TREE, release="round"), schedule="overlap")


def test_a_pool_has_a_page():
    with pytest.raises(InputError, check=lambda error: error.name == "num_slots"):
        make(num_slots=3)


def test_generate_is_one_run_of_a_scheduler(monkeypatch):
    made = []

    class Seen(Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(generation, "Scheduler", Seen)
    result = generate(
        pair_of(),
        [LONG, SHORT, OTHER],
        TREE,
        SamplingParams(max_new_tokens=9),
        engine=EngineOptions(dtype=torch.float64),
    )
    (scheduler,) = made
    chunks = tuple(Chunk(number, 0, len(prompt)) for number, prompt in enumerate((LONG, SHORT, OTHER)))
    assert scheduler.trace.records[0].prefilled == chunks
    assert scheduler.trace.records[0].decoded == (0, 1, 2)
    assert not events(scheduler, "preempted")
    assert [tuple(each.token_ids) for each in scheduler.requests.values()] == [
        each.token_ids for each in result.outputs
    ]


@pytest.mark.parametrize("reason", ["never closed", "closed under way", "closed twice"])
def test_close_gives_everything_back(reason):
    scheduler = three_running(prefix_cache=True)
    if reason == "closed twice":
        scheduler.run()
        scheduler.close()
    usage = scheduler.close()
    assert (usage["free"], usage["requests"], usage["cached"]) == (usage["slots"], 0, 0)
    assert not scheduler.is_busy
    check_alone(scheduler.requests.values())


FAST = {
    "tree": SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, max_len=64),
    "chain": SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=1, max_len=64),
    "branchy": SpecConfig(topk=3, num_steps=2, num_draft_tokens=7, page_size=16, max_len=64),
}


@cache
def fast_engine(name: str, graph: str, device: str):
    pair = make_pair("eagle-llama", torch.float32)
    return load_engine(pair, FAST[name], EngineOptions("fast", torch.float32, device, graph, 3))


def bits(engine, numbers, schedule: str = "sync") -> dict[int, tuple]:
    """Tokens and logprobs of these requests, each of whose prompts is prefilled in a call of its own."""
    prompts = ([5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 7, 30])
    scheduler = make(engine=engine, schedule=schedule, max_running=3)
    for place, number in enumerate(numbers):
        params = {"temperature": number % 2, "presence_penalty": 0.3 * (number == 2)}
        scheduler.submit(ask(number, prompts[number], 5, schedule={"arrival": place}, **params))
    serve(scheduler)
    assert all(len(record.prefilled) <= 1 for record in scheduler.trace.records)
    return {number: (each.token_ids, each.logprobs, each.accepted) for number, each in scheduler.requests.items()}


@pytest.mark.parametrize("name", ["tree", "chain", pytest.param("branchy", marks=pytest.mark.whole)])
def test_fast_gives_the_bits_of_a_solo_run_in_equal_buffers(name, device):
    """Whatever its row: prompts are prefilled each in a call of its own, and every round has the bucket's shape."""
    engine = fast_engine(name, "eager", device)
    by_themselves = {number: bits(engine, [number])[number] for number in range(3)}
    for order in ([0, 1, 2], [2, 0, 1]):
        assert bits(engine, order) == by_themselves


MODES = (("eager", "overlap"), ("step", "sync"), ("phase", "sync"), ("round", "overlap"))
OTHER_MODES = (("eager", "sync"), ("step", "overlap"), ("phase", "overlap"), ("round", "sync"))


@pytest.mark.parametrize(
    ("graph", "schedule"), [*MODES, *(pytest.param(*each, marks=pytest.mark.whole) for each in OTHER_MODES)]
)
def test_fast_graph_modes_and_schedules_give_the_same_bits(graph, schedule, device):
    expected = _expected_bits(device)
    assert bits(fast_engine("tree", graph, device), [0, 1, 2], schedule) == expected


@cache
def _expected_bits(device: str) -> dict[int, tuple]:
    return bits(fast_engine("tree", "eager", device), [0, 1, 2])


@SCHEDULES
def test_a_scheduler_made_in_inference_mode_works_outside_it(schedule):
    """Tests here run inside."""
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
def test_a_request_ends_at_the_engines_max_len(schedule):
    """And costs others nothing."""
    greedy, other = ask(0, max_new_tokens=200), ask(1)
    scheduler = serve(make(schedule=schedule), greedy, other)
    assert len(greedy.known_ids) == scheduler.max_len
    assert (greedy.finish_reason, other.finish_reason) == ("length", "length")
    check_alone([greedy, other])


def test_an_id_is_taken_once_over_all_ranks():
    ranks = Ranks([make(), make()])
    ranks.submit(ask(0))
    with pytest.raises(InputError, check=lambda error: error.name == "request_id"):
        ranks.submit(ask(0))


@SCHEDULES
def test_no_kv_is_held_for_a_turn_that_will_never_come(schedule):
    scheduler = make(schedule=schedule)
    for request in (ask(0), ask(1, schedule={"continues": 0, "abort_at": 1})):
        scheduler.submit(request)
    scheduler.run()
    assert scheduler.pools.usage()["requests"] == 0


@SCHEDULES
def test_kv_is_held_for_a_turn_after_another_was_aborted(schedule):
    scheduler = make(schedule=schedule)
    gone, coming = {"continues": 0, "arrival": 30, "abort_at": 20}, {"continues": 0, "arrival": 40}
    requests = [ask(0), ask(1, schedule=gone), ask(2, [1, 2], schedule=coming)]
    serve(scheduler, *requests)
    assert requests[1].finish_reason == "abort"
    assert requests[2].num_reused == requests[0].prefill_len
    check_alone([requests[2]])


@SCHEDULES
def test_max_running_conversations_wait_while_others_run(schedule):
    first = [ask(number, OTHER, 4) for number in range(3)]
    others = [ask(3 + number, SHORT, 12, schedule={"arrival": 20}) for number in range(3)]
    turns = [ask(6 + number, [1, 2], 4, schedule={"continues": number, "arrival": 60}) for number in range(3)]
    serve(make(schedule=schedule, max_running=3), *first, *others, *turns)
    assert [turn.num_reused for turn in turns] == [request.prefill_len for request in first]


@pytest.mark.parametrize("drive", ["step", "run"])
def test_an_abort_comes_at_its_step_whoever_drives(drive):
    """Also before the arrival, and when nothing else happens in between."""
    scheduler, request = make(), ask(0, schedule={"arrival": 10, "abort_at": 5})
    scheduler.submit(request)
    scheduler.run() if drive == "run" else [scheduler.step() for _ in range(12)]
    assert [record.step for record in scheduler.trace.records if record.aborted] == [5]
    assert request.arrived is None


def test_aborts_by_close_are_recorded():
    scheduler = make()
    scheduler.submit(ask(0))
    scheduler.step()
    scheduler.close()
    assert scheduler.trace.counts()["aborted"] == 1


@pytest.mark.parametrize("abort_at", [0, 1, 3])
def test_a_turn_of_one_that_never_began_is_rejected(abort_at):
    """Its conversation would lack what came before."""
    first, gone = ask(0, max_new_tokens=20), ask(1, [1, 2], schedule={"continues": 0, "abort_at": abort_at})
    last = ask(2, [3, 4], schedule={"continues": 1, "arrival": 30})
    serve(make(), first, gone, last)
    assert (gone.finish_reason, last.finish_reason) == ("abort", "rejected")
    assert last.error == "request 1, which it continues, was aborted before it began"


@SCHEDULES
@pytest.mark.parametrize("stops", [False, True])
def test_a_turn_begins_with_all_that_was_said_before(stops, schedule):
    """The token that stopped the turn before is part of it."""
    output = run_solo(pair_of(), TREE, ask(0, max_new_tokens=12))
    stop = (output.token_ids[4],) if stops else ()
    first, turn = ask(0, max_new_tokens=12, stop_token_ids=stop), ask(1, [1, 2, 3], schedule={"continues": 0})
    serve(make(schedule=schedule), first, turn)
    assert first.finish_reason == ("stop" if stops else "length")
    assert turn.prompt_ids == [*SHORT, *first.token_ids, 1, 2, 3]


def test_a_request_is_served_once():
    request = serve(make(), ask(0)).requests[0]
    with pytest.raises(InputError, check=lambda error: error.name == "request"):
        make().submit(request)


def test_steps_are_skipped_also_before_a_turn():
    first = ask(0, max_new_tokens=2, schedule={"arrival": 10**9})
    scheduler = serve(make(), first, ask(1, [1], 2, schedule={"continues": 0}))
    assert len(scheduler.trace) < 10
    assert scheduler.requests[1].finish_reason == "length"


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


@SCHEDULES
def test_a_step_prefills_no_more_than_its_budget_over_all(schedule):
    scheduler = serve(make(schedule=schedule, chunk_tokens=5), *(ask(each, LONG[each:]) for each in range(4)))
    chunks = [sum(each.end - each.start for each in record.prefilled) for record in scheduler.trace.records]
    assert max(chunks) == 5
    assert any(len(record.prefilled) > 1 for record in scheduler.trace.records)


@SCHEDULES
def test_nobody_overtakes_who_waits_for_room(schedule):
    """A small request that comes later stays behind a large one of the same priority."""
    running, large, small = ask(0, LONG, 14), ask(1, LONG[::-1], 14), ask(2, [5], 2)
    config = CHAIN.reserved_columns(len(LONG) + 14)
    scheduler = make(CHAIN, schedule=schedule, num_slots=config + 8)
    serve(scheduler, running, large, small)
    assert events(scheduler, "admitted")[:3] == [0, 1, 2]
    admitted = {name: r.step for r in scheduler.trace.records for name in r.admitted}
    assert admitted[1] > 0
    assert admitted[2] >= admitted[1]


def test_an_aborted_request_leaves_nothing_for_its_next_turn():
    scheduler = make()
    for request in (ask(0, max_new_tokens=20), ask(1, [1], schedule={"continues": 0, "arrival": 50})):
        scheduler.submit(request)
    for _ in range(3):
        scheduler.step()
    scheduler.abort(0)
    assert scheduler.pools.usage()["requests"] == 0
    scheduler.run()
    assert scheduler.requests[1].num_reused == 0
    check_alone([scheduler.requests[1]])


def test_waiting_for_a_place_counts_towards_the_first_token():
    scheduler = serve(make(max_running=1), ask(0, max_new_tokens=14), ask(1))
    assert [request.arrived[0] for request in scheduler.requests.values()] == [0, 0]
    assert scheduler.requests[1].emissions[0][0] > 3


def test_times_are_seconds_since_the_scheduler_was_made():
    now, request = [100.0], ask(0)
    scheduler = Scheduler(engine_of(), ServingConfig(num_slots=1000), clock=lambda: now[0])
    scheduler.submit(request)
    now[0] = 102.5
    assert scheduler.step().seconds == 2.5
    assert request.arrived == (0, 2.5)
    assert [seconds for _, seconds, _ in request.emissions] == [2.5, 2.5]  # of the prompt and of a round


@SCHEDULES
def test_between_steps_no_more_is_committed_than_is_known(schedule):
    """Columns of tokens that the host knows, the last of which is the root of the next round."""
    scheduler = make(schedule=schedule)
    for request_id in range(3):
        scheduler.submit(ask(request_id, LONG[: 5 * request_id + 3], 12, temperature=1.0))
    while scheduler.is_busy:
        scheduler.step()
        for request in scheduler.runner.requests:
            assert scheduler.residents.committed(request) == request.prefill_len
