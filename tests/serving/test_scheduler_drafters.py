"""Drafters under the scheduler: tokens equal those of solo runs, and token drafters learn every end once."""

from collections import Counter

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.drafter import columns_ahead
from specsim.core.engine_options import EngineOptions
from specsim.core.kinds import KINDS as RECORDS
from specsim.core.kinds import TESTED
from specsim.core.phases import Batch, PrefillInput
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


# Rows, prefixes and pools that are used again.

STEM = [(7 * i + i * i) % 47 for i in range(46)]
REUSING = (  # requests, one at a time in two rows: prompt, new tokens, step of an abort
    (STEM, 2, 1),  # aborted after a chunk, whose last rows no later chunk writes again
    (STEM, 4, None),  # a chunk longer than the ring of features and than a kernel's block of rows
    (STEM[:21][::-1], 3, None),  # leaves other features where request 4, of the same row, begins
    (SHORT, 1, None),
    ([*STEM[:26], 1, 2, 3, 4], 3, None),  # parts from cached tokens two columns after a page
)
REUSED = [
    (kind, "reference") for kind in KINDS if TESTED[kind].kv == "own" and kind in (*RECORDS, "standalone.shifted")
]


def contents(pools, slots) -> dict[str, torch.Tensor]:
    """Read the KV and the side outputs of slots."""
    parts = ((name, getattr(pools, name), part) for name in ("target", "draft") for part in ("keys", "values"))
    return {f"{name} {part}": getattr(buffer, part)[:, slots] for name, buffer, part in parts} | pools.side.read(slots)


@pytest.mark.parametrize(("kind", "impl"), [*REUSED, ("mtp", "fast"), ("p-eagle", "fast")])
def test_kept_pages_hold_what_a_whole_prefill_writes(make, ask, kind, impl, monkeypatch):
    """KV and side outputs of committed columns depend on the tokens alone, whatever was in their slots and rows."""
    if impl == "fast":  # as on a GPU, a block has fewer rows than a chunk
        rows = f"specsim.fast.drafters.{kind.replace('-', '_')}_rows.block_of"
        monkeypatch.setattr(rows, lambda count, on_gpu, others=1: on_gpu)
    pair = make_pair(f"{kind}-qwen3_moe" if impl == "reference" else f"{kind}-noisy")
    config = SpecConfig(topk=1, num_steps=3, page_size=2)
    engine = load_engine(pair, config, FLOAT64 if impl == "reference" else EngineOptions("fast", graph="eager"))
    scheduler = make(engine=engine, max_running=1, chunk_tokens=24, prefix_cache=True)
    requests = [
        ask(number, prompt, size, pair, {"arrival": min(number, 1), "abort_at": abort_at})
        for number, (prompt, size, abort_at) in enumerate(REUSING)
    ]
    scheduler.submit(*requests)
    scheduler.run()
    assert [request.num_reused > 0 for request in requests] == [False, True, False, False, True]
    pools = engine.make_pools(len(requests), 1000)
    token_ids = [request.known_ids for request in requests]
    lengths = [len(tokens) for tokens in token_ids]
    for length in lengths:
        pools.reserve(pools.open(), length + columns_ahead(engine.drafter))
    params = [request.params for request in requests]
    batch = Batch.of(range(len(lengths)), range(len(lengths)), lengths, params, pair.target.config.vocab_size)
    engine.prefill(batch.to(engine.device), PrefillInput.of_prompts(token_ids).to(engine.device), pools)
    for row, tokens in enumerate(token_ids):
        pages = torch.tensor(scheduler.reservations._tree.match(tokens, len(tokens)))
        assert requests[row].finish_reason == "abort" or 2 * len(pages) >= len(tokens) - 4
        expected = contents(pools, pools.slots(row, torch.arange(2 * len(pages), device=engine.device)))
        actual = contents(scheduler.pools, (2 * pages[:, None] + torch.arange(2)).flatten().to(engine.device))
        budget = 1e-9 if impl == "reference" else 1e-4
        torch.testing.assert_close(actual, expected, rtol=budget, atol=budget)
    scheduler.close()


@pytest.mark.parametrize(
    ("kind", "impl"), [*REUSED, *((kind, "fast") for kind in ("eagle", "mtp", "p-eagle", "dflash"))]
)
def test_rounds_past_the_limit_write_nothing_there(kind, impl):
    """A lagging schedule runs rounds of requests that have ended at max_len."""
    pair = make_pair(f"{kind}-llama")
    config = SpecConfig(topk=1, num_steps=3, page_size=16, max_len=12)  # a tree has columns that are no positions
    engine = load_engine(pair, config, FLOAT64 if impl == "reference" else EngineOptions("fast", graph="eager"))
    pools = engine.make_pools(1, 64)
    row = pools.open()
    pools.reserve(row, 32)
    for buffer in (pools.target, pools.draft):
        buffer.keys.fill_(torch.nan)
    batch = Batch.of([0], [row], [len(OTHER[:10])], [SamplingParams()], pair.target.config.vocab_size).to(engine.device)
    prompt = PrefillInput.of_prompts([OTHER[:10]]).to(engine.device)
    draft_input = engine.prefill(batch, prompt, pools).draft_input
    while int(batch.seq_lens) < 14:
        advance = engine.advance(batch, draft_input, pools)
        batch, draft_input = advance.batch, advance.draft_input
    written = [~buffer.keys[:, pools.slots(row, torch.arange(32))].isnan() for buffer in (pools.target, pools.draft)]
    assert [keys.all(-1).all(-1).all(0).tolist() for keys in written] == [[True] * 12 + [False] * 20] * 2
