"""Conversations: prompts of later turns, and the KV that is kept for them."""

from dataclasses import replace

import pytest

from specsim import InputError
from specsim.correctness.invariance.solo import run_solo

from .settings import BRANCHY, CHAIN, LONG, OTHER, SCHEDULES, SHORT, TREE

pytestmark = pytest.mark.usefixtures("inference")


def test_a_turn_follows_a_request_that_is_there(make, ask):
    with pytest.raises(InputError, check=lambda error: error.name == "continues"):
        make().submit(ask(5, schedule={"continues": 4}))


def test_a_turn_of_a_rejected_request_is_rejected(make, ask):
    requests = [ask(0, LONG * 4), ask(1, schedule={"continues": 0}), ask(2, schedule={"continues": 1}), ask(3)]
    make().serve(*requests)
    assert [request.finish_reason for request in requests] == ["rejected"] * 3 + ["length"]
    assert requests[1].error == "request 0, which it continues, was rejected"
    assert requests[2].error == "request 1, which it continues, was rejected"


def test_a_turn_without_room_for_its_conversation_is_rejected(make, ask):
    requests = [ask(0, LONG * 2, 20), ask(1, SHORT, schedule={"continues": 0})]
    make().serve(*requests)
    assert (requests[0].finish_reason, requests[1].finish_reason) == ("length", "rejected")
    assert requests[1].error.startswith("a prompt of 64 tokens; at most 63")


@pytest.mark.parametrize(("release", "schedule"), [("finish", "sync"), ("finish", "overlap"), ("round", "sync")])
@pytest.mark.parametrize("pressure", [False, True])
def test_a_turn_starts_from_the_kv_of_its_conversation(make, ask, check_solo, pressure, release, schedule):
    """It computes all of the KV again where that was evicted."""
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
    check_solo([first, turn], config)


@SCHEDULES
@pytest.mark.parametrize("config", [TREE, CHAIN, BRANCHY], ids=["tree", "chain", "branchy"])
def test_prefixes_are_reused_and_nothing_else_changes(make, ask, check_solo, config, schedule):
    tokens, prefilled = {}, {}
    prompts = [LONG + SHORT, LONG + SHORT, LONG + OTHER, LONG[:18] + OTHER, SHORT]
    for prefix_cache in (False, True):
        requests = [
            ask(number, prompt, 6, schedule={"arrival": 3 * number}, temperature=number % 2, presence_penalty=0.5)
            for number, prompt in enumerate(prompts)
        ]
        scheduler = make(config, schedule=schedule, prefix_cache=prefix_cache).serve(*requests)
        tokens[prefix_cache] = [(each.token_ids, each.accepted) for each in requests]
        prefilled[prefix_cache] = scheduler.trace.counts()["num_prefilled"]
        assert sum(request.num_reused for request in requests) == scheduler.trace.counts()["num_reused"]
        assert prefilled[prefix_cache] + scheduler.trace.counts()["num_reused"] == sum(map(len, prompts))
        check_solo(requests, config)
    assert tokens[False] == tokens[True]
    assert prefilled[False] == sum(map(len, prompts))
    # A draft slot holds the token after it, so the last token that two have in common is not in a shared page.
    assert prefilled[False] - prefilled[True] == sum(
        shared // config.page_size * config.page_size for shared in (23, 19, 17)
    )


@SCHEDULES
def test_no_kv_is_kept_for_a_turn_that_will_never_arrive(make, ask, schedule):
    scheduler = make(schedule=schedule)
    scheduler.submit(ask(0), ask(1, schedule={"continues": 0, "abort_at": 1}))
    scheduler.run()
    assert scheduler.pools.usage()["requests"] == 0


@SCHEDULES
def test_kv_is_kept_for_a_turn_after_another_was_aborted(make, ask, check_solo, schedule):
    scheduler = make(schedule=schedule)
    gone, coming = {"continues": 0, "arrival": 30, "abort_at": 20}, {"continues": 0, "arrival": 40}
    requests = [ask(0), ask(1, schedule=gone), ask(2, [1, 2], schedule=coming)]
    scheduler.serve(*requests)
    assert requests[1].finish_reason == "abort"
    assert requests[2].num_reused == requests[0].prefill_len
    check_solo([requests[2]])


@SCHEDULES
def test_max_running_conversations_wait_while_others_run(make, ask, schedule):
    first = [ask(number, OTHER, 4) for number in range(3)]
    others = [ask(3 + number, SHORT, 12, schedule={"arrival": 20}) for number in range(3)]
    turns = [ask(6 + number, [1, 2], 4, schedule={"continues": number, "arrival": 60}) for number in range(3)]
    make(schedule=schedule, max_running=3).serve(*first, *others, *turns)
    assert [turn.num_reused for turn in turns] == [request.prefill_len for request in first]


@pytest.mark.parametrize("abort_at", [0, 1, 3])
def test_a_turn_of_one_that_never_began_is_rejected(make, ask, abort_at):
    """Its conversation would lack the earlier turn."""
    first, gone = ask(0, max_new_tokens=20), ask(1, [1, 2], schedule={"continues": 0, "abort_at": abort_at})
    last = ask(2, [3, 4], schedule={"continues": 1, "arrival": 30})
    make().serve(first, gone, last)
    assert (gone.finish_reason, last.finish_reason) == ("abort", "rejected")
    assert last.error == "request 1, which it continues, was aborted before it began"


@SCHEDULES
@pytest.mark.parametrize("stops", [False, True])
def test_a_turn_begins_with_the_whole_conversation(make, ask, pair, stops, schedule):
    """The token that stopped the earlier turn is part of it."""
    output = run_solo(pair, TREE, ask(0, max_new_tokens=12))
    stop = (output.token_ids[4],) if stops else ()
    first, turn = ask(0, max_new_tokens=12, stop_token_ids=stop), ask(1, [1, 2, 3], schedule={"continues": 0})
    make(schedule=schedule).serve(first, turn)
    assert first.finish_reason == ("stop" if stops else "length")
    assert turn.prompt_ids == [*SHORT, *first.token_ids, 1, 2, 3]


def test_steps_are_skipped_also_before_a_turn(make, ask):
    first = ask(0, max_new_tokens=2, schedule={"arrival": 10**9})
    scheduler = make().serve(first, ask(1, [1], 2, schedule={"continues": 0}))
    assert len(scheduler.trace) < 10
    assert scheduler.requests[1].finish_reason == "length"


def test_an_aborted_request_keeps_nothing_for_its_next_turn(make, ask, check_solo):
    scheduler = make()
    scheduler.submit(ask(0, max_new_tokens=20), ask(1, [1], schedule={"continues": 0, "arrival": 50}))
    for _ in range(3):
        scheduler.step()
    scheduler.abort(0)
    assert scheduler.pools.usage()["requests"] == 0
    scheduler.run()
    assert scheduler.requests[1].num_reused == 0
    check_solo([scheduler.requests[1]])
