"""Drafters under the scheduler: tokens equal those of solo runs, and token drafters learn every end once."""

from collections import Counter

import pytest
import torch

from specsim import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.token_drafter import NgramConfig, Proposal, SuffixConfig
from specsim.correctness.differential.pairs import KINDS, make_pair
from specsim.serving.generation import load_engine
from specsim.serving.ranks import Ranks

from .settings import LONG, OTHER, SCHEDULES, SHORT, TREE

CHAIN = SpecConfig(topk=1, num_steps=3, page_size=4, max_len=64)
FLOAT64 = EngineOptions("reference", torch.float64)
pytestmark = pytest.mark.usefixtures("inference")


class Repeats:
    """A drafter of one's own: what followed the last occurrence of the last token; it notes every end."""

    def __init__(self):
        self.ended = []
        self.proposed = Counter()

    def propose(self, request_id, tokens, limits):
        assert request_id not in {ended for ended, *_ in self.ended}, "a request is asked for after its end"
        found = [place for place, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        drafts = tokens[found[-1] + 1 :][: limits.max_depth] if found else []
        self.proposed[request_id] += 1
        return Proposal(drafts, range(-1, len(drafts) - 1), [1.0] * len(drafts))

    def finish(self, request_id, tokens, prompt_len):
        self.ended.append((request_id, tuple(tokens), prompt_len))


OWN = {"own": Repeats, "ngram": NgramConfig, "suffix": lambda: SuffixConfig(shared=False)}


def served(make, ask, drafter, config, **serving):
    """Serve requests that share prefixes, preempt each other, continue conversations, and are aborted."""
    pair = make_pair("eagle-noisy").with_drafter(drafter)
    fields = {
        "num_slots": 112 if config.topk > 1 else 72,
        "max_running": 3,
        "chunk_tokens": 9,
        "prefix_cache": True,
    } | serving
    scheduler = make(engine=load_engine(pair, config, FLOAT64), **fields)
    requests = [
        ask(0, LONG, 12, temperature=1.0, schedule={"keep": True}),
        ask(1, LONG + SHORT, 14),
        ask(2, SHORT, 20, temperature=1.0, schedule={"arrival": 1}),
        ask(3, LONG[:13], 16, schedule={"arrival": 1, "abort_at": 9}),
        ask(4, OTHER, 6, schedule={"continues": 0}),
        ask(5, OTHER, 20, schedule={"arrival": 30, "abort_at": 30}),
        ask(6, LONG * 4, 9),
        ask(7, SHORT, 1, schedule={"arrival": 4}),
    ]
    scheduler.serve(*requests)
    return pair, scheduler, requests


@SCHEDULES
@pytest.mark.parametrize("config", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("name", OWN)
def test_token_drafters_give_the_tokens_of_solo_runs(make, ask, check_solo, name, config, schedule):
    """With preemption, a prefix cache, a conversation and aborts."""
    pair, scheduler, requests = served(make, ask, OWN[name](), config, schedule=schedule)
    ends = {each.request_id: each.finish_reason for each in requests}
    assert (ends[3], ends[6], ends[0], ends[7]) == ("abort", "rejected", "length", "length")
    assert scheduler.events("preempted")
    assert sum(each.num_reused for each in requests) > 0
    assert any(count > 1 for each in requests for count in each.accepted)
    assert any(depth == 0 for each in requests for depth in each.proposed)
    solo = Repeats() if name == "own" else pair.drafter
    check_solo([each for each in requests if each.token_ids], config, pair.with_drafter(solo))


@pytest.mark.parametrize(("schedule", "release"), [("sync", "finish"), ("sync", "round"), ("overlap", "finish")])
def test_a_drafter_learns_each_end_once_with_all_tokens(make, ask, schedule, release):
    """Also of a request that was aborted or never fitted; after its end it gets no proposal."""
    drafter = Repeats()
    config = SpecConfig(topk=1, num_steps=3, page_size=4, max_len=64, release=release)
    _, _, requests = served(make, ask, drafter, config, schedule=schedule)
    expected = [(each.request_id, (*each.prompt_ids, *each.token_ids), len(each.prompt_ids)) for each in requests]
    assert sorted(drafter.ended) == expected
    assert {each.request_id for each in requests if each.accepted} <= set(drafter.proposed)


def test_a_preempted_request_is_asked_for_with_all_its_tokens(make, ask):
    """Tokens before the preemption are read again, so that no proposal misses one."""
    seen = {}

    class Noted(Repeats):
        def propose(self, request_id, tokens, limits):
            known = seen.setdefault(request_id, [])
            assert list(tokens[: len(known)]) == known
            seen[request_id] = list(tokens)
            return super().propose(request_id, tokens, limits)

    _, scheduler, requests = served(make, ask, Noted(), CHAIN)
    again = {preempted.request_id for preempted in scheduler.events("preempted")}
    assert again & set(seen)
    for each in requests:
        if each.request_id in seen:
            assert [*each.prompt_ids, *each.token_ids][: len(seen[each.request_id])] == seen[each.request_id]


@pytest.mark.every_value
@SCHEDULES
@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_rank_passes_through_every_phase(make, ask, check_solo, kind, schedule):
    """One rank has requests from the first step on, the other one none, then one."""
    pair = make_pair(f"{kind}-noisy")
    engines = [load_engine(pair, TREE, FLOAT64) for _ in range(2)]
    ranks = Ranks([make(engine=each, schedule=schedule) for each in engines])
    requests = [ask(0, LONG, 9, temperature=1.0), ask(1, SHORT, 4, schedule={"arrival": 5})]
    for request in requests:
        ranks.submit(request)
    idle = 0
    while ranks.is_busy:
        records = ranks.step()
        idle += sum(bool(each.decoded) for each in records) == 1
    assert idle >= 2
    for scheduler in ranks.schedulers:
        scheduler.close()
    check_solo(requests, TREE, pair)
