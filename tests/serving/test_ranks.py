"""Data-parallel ranks: phases together, ids, conversations, stalls."""

from collections import Counter
from functools import partial

import pytest
import torch

from specsim import InputError
from specsim.core.engine_options import EngineOptions
from specsim.serving.generation import load_engine
from specsim.serving.ranks import Ranks

from .settings import LONG, OTHER, SCHEDULES, SHORT, TREE

pytestmark = pytest.mark.usefixtures("inference")


def counting(pair, calls: Counter):
    """Make an engine whose prefills and rounds are counted, with and without requests."""
    engine = load_engine(pair, TREE, EngineOptions("reference", torch.float64))

    def counted(name, act, batch, *args, **kwargs):
        calls.update([name, *([f"{name} of nobody"] if batch.size == 0 else [])])
        return act(batch, *args, **kwargs)

    for name in ("prefill", "round"):
        setattr(engine, name, partial(counted, name, getattr(engine, name)))
    return engine


@SCHEDULES
def test_ranks_pass_through_every_phase_together(make, ask, check_solo, pair, schedule):
    """In each step every rank has the same number of prefills and rounds, even a rank without work."""
    calls = [Counter() for _ in range(3)]
    serving = {"schedule": schedule, "chunk_tokens": 7, "max_running": 2}
    ranks = Ranks([make(engine=counting(pair, each), **serving) for each in calls])
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
    check_solo(requests)


def test_a_conversation_stays_on_its_rank(make, ask, check_solo):
    ranks = Ranks([make(), make()])
    first, turn = ask(0, schedule={"keep": True}), ask(3, schedule={"continues": 0})
    requests = [first, ask(1, OTHER, 16), ask(2, OTHER, 16), turn]
    for request in requests:
        ranks.submit(request)
    ranks.run()
    assert ranks.scheduler_by_id[3] is ranks.scheduler_by_id[0]
    assert turn.num_reused == len(first.prompt_ids) + 7
    check_solo(requests)
    ranks.submit(ask(4))  # the first rank had more requests, but none is unfinished
    assert ranks.scheduler_by_id[4] is ranks.schedulers[0]


def test_a_stalled_rank_raises_an_error(make, ask):
    ranks = Ranks([make(), make()])
    for number in range(2):
        ranks.submit(ask(number))
    ranks.schedulers[0].limit(0)
    with pytest.raises(InputError, check=lambda error: error.name == "limit"):
        ranks.run()


def test_an_id_is_taken_once_over_all_ranks(make, ask):
    ranks = Ranks([make(), make()])
    ranks.submit(ask(0))
    with pytest.raises(InputError, check=lambda error: error.name == "request_id"):
        ranks.submit(ask(0))
