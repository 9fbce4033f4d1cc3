"""The soak: it passes correct engines, names and repeats faults, and requires its coverage."""

import io
import json
import re
from dataclasses import replace
from functools import reduce

import pytest
import torch
from rich.console import Console

import specsim.correctness.invariance.solo as solo
import specsim.correctness.soak.trial as trial
from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import DraftInput
from specsim.core.verifiers import VERIFIER_KINDS
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.invariance.replay import ReplayedRuns
from specsim.correctness.soak.coverage import REQUIRED, accepted_name, coverage_of, required
from specsim.correctness.soak.programs import (
    KINDS,
    MOST_REQUESTS,
    SHARED,
    Submission,
    draw,
    families,
    formats,
    named,
    pair_of,
    possible_graph,
)
from specsim.correctness.soak.session import LEAST_REQUESTS, REQUIRED_EVENTS, Soak, soak
from specsim.correctness.soak.trial import ProgramResult
from specsim.serving.admission import Admission
from specsim.serving.generation import load_engine
from specsim.serving.prefix import PrefixTree
from specsim.serving.ranks import Ranks
from specsim.serving.requests import Request
from specsim.serving.reservations import Reservations
from specsim.serving.runner import Runner
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import EVENTS, Chunk, DeliveredRound, Preemption

PROGRAMS = [draw(0, index) for index in range(600)]


def shown(result: Soak) -> str:
    console = Console(file=io.StringIO(), width=100)
    result.show(console)
    return console.file.getvalue()


# What is right passes.


def test_a_small_soak_passes():
    small = soak(150, seed=0)
    assert small.failures == ()
    assert small.is_ok
    figures = small.figures()
    assert figures["requests"] == 150
    assert figures["programs"] == len(small.programs) > 4
    assert figures["mismatches"] == figures["within rounding error"] == 0
    assert figures["audits"] == figures["steps"]
    assert 0 <= figures["largest logprob error"] <= 2e-6
    met = ("tokens", "preempted", "turns", "reused columns", "prefill chunks", "cut inside a path", "slots audited")
    assert [name for name in met if not figures[name]] == []
    value = json.loads(json.dumps(small.to_json(), allow_nan=False))
    assert value["command"] == "specsim soak --requests 150 --seed 0"
    assert value["figures"] == figures
    assert len(value["programs"]) == figures["programs"]
    assert (value["is_ok"], value["failures"], value["missing"]) == (True, [], None)
    assert (value["date"], value["versions"]) == (small.date, small.versions)
    text = shown(small)
    assert all(name in text for name in value["figures"])
    assert text.endswith("All 150 requests equal their solo runs, and all slots are accounted for.\n")


def test_results_do_not_depend_on_processes():
    single, shared = (soak(16, seed=15, jobs=jobs) for jobs in (1, 2))
    assert len(single.programs) > 2
    assert single.programs == shared.programs


# Programs.


def test_a_program_is_made_again_from_its_name():
    assert all(named(program.name) == program for program in PROGRAMS[:20])
    whole = draw(0, 7)
    for most in (1, 5):
        cut = replace(whole, name=f"0-7-{most}", submissions=whole.submissions[:most])
        assert draw(0, 7, most) == cut


@pytest.mark.parametrize("name", ["", "7", "0-1", "0-1-0", f"0-1-{MOST_REQUESTS + 1}", "0-x-3", "0--1-3"])
def test_a_name_that_no_program_has(name):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("program", name)):
        named(name)


def test_programs_cover_the_settings():
    configs, servings = [each.config for each in PROGRAMS], [each.serving for each in PROGRAMS]
    assert {each.page_size for each in configs} == {1, 2, 4, 16}
    assert {each.topk for each in configs} == {1, 2, 3, 4}
    assert {each.num_steps for each in configs} == {0, 1, 2, 3, 4, 5}
    for name in ("release", "extend", "draft_kv", "score", "penalties"):
        assert len({getattr(each, name) for each in configs}) == 2
    overlapping = {(each.config.page_size, each.config.topk) for each in PROGRAMS if each.serving.schedule == "overlap"}
    assert len(overlapping) == 4 * 4
    assert {each.preemption for each in servings} == {"latest", "shortest", "longest"}
    assert {each.prefix_cache for each in servings} == {True, False}
    assert None in {each.chunk_tokens for each in servings} > {1}
    assert {each.num_ranks for each in PROGRAMS} == {1, 2, 3}
    assert {each.graph for each in PROGRAMS} == {"eager", "step", "phase", "round"}
    drawn = [draw(0, index, 1) for index in range(1500)]
    assert {each.pair for each in drawn} == {f"{kind}-{family}" for kind in KINDS for family in families(kind)}
    assert {(each.kind, each.kv) for each in drawn} == {(kind, kv) for kind in KINDS for kv in formats(kind)}
    assert all(each.limits[-1][1] == each.serving.num_slots for each in PROGRAMS if each.limits)


def test_programs_cover_what_requests_may_ask_for():
    submissions = [each for program in PROGRAMS[:40] for each in program.submissions]
    params = [each.params for each in submissions]
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert len({getattr(each, name) for each in params}) == 2
    assert {each.temperature for each in params} == {0.0, 0.5, 1.0}
    assert any(each.stop_token_ids for each in params)
    assert any(each.logit_bias for each in params)
    for name in ("continues", "abort_at", "priority", "keep", "step"):
        assert any(getattr(each, name) for each in submissions)


# What is wrong is found, and named with what repeats it.


FAULTS = {}


def fault(owner, name: str, program: str, seen: str):
    """Register a function that replaces an attribute, with a small program that shows it, and what is seen.

    It is called with the attribute that it replaces, and then as that is.
    """

    def register(wrong):
        def inject(monkeypatch) -> None:
            right = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *given, **named: wrong(right, *given, **named), raising=False)

        FAULTS[wrong.__name__] = (inject, program, seen)
        return inject

    return register


@fault(PrefixTree, "__init__", "22-231-8", "accepted is")
def forget_next_token(init, self, pools, lookahead=0):
    """Pages are shared whose last draft slot holds another token."""
    init(self, pools, lookahead)
    self._label_len = self._page_size


@fault(DraftInput, "filter", "0-6-4", "token_ids is")
def slice_after_index(index, self, keep):
    """The first rows are kept, not those that were meant."""
    return index(self, torch.arange(len(keep)))


@fault(Runner, "drop", "0-2-4", "RuntimeError: The (expanded )?size of (the )?tensor")
def keep_draft_input(drop, self, requests):
    """The batch loses rows, and the draft state keeps them."""
    before = self._draft_input
    drop(self, requests)
    self._draft_input = before


FIRST = {}


@fault(Runner, "_join", "0-6-4", "token_ids is")
def resume_with_old_drafts(join, self, requests, batch, draft_input):
    """A resumed request joins with the draft state that it had when it first joined."""
    places = torch.arange(len(requests))
    rows = [FIRST.setdefault(each, draft_input.filter(places[at : at + 1])) for at, each in enumerate(requests)]
    join(self, requests, batch, reduce(DraftInput.merge, rows, draft_input.filter(places[:0])))


@fault(Admission, "_preempt", "0-10-4", "token_ids is")
def draw_again_on_resumption(preempt, self, request):
    """A resumed request samples its last token again."""
    preemption = preempt(self, request)
    del request.token_ids[-1:], request.logprobs[-1:]
    return preemption


@fault(Reservations, "mark_committed", "0-0-4", "NotFinite")  # KV of slots that nothing wrote is NaN
def commit_too_much(mark_committed, self, request, columns):
    """The bonus token's column counts as filled."""
    return mark_committed(self, request, columns + 1)


@fault(Request, "take", "0-0-4", "token_ids is")
def keep_tokens_after_the_end(take, self, token_ids, logprobs):
    """A stop inside an accepted path ends the request after the path."""
    kept = take(self, token_ids, logprobs)
    self.token_ids += token_ids[kept:]
    self.logprobs += logprobs[kept:]
    return len(token_ids)


@fault(Reservations, "_open", "1-4-4", "token_ids is")
def share_and_record_nothing(_, self, request):
    """Shared pages are taken over without a record of their tokens."""
    row = self._pools.open()
    if self._tree is not None:
        self._pools.share(row, self._tree.match(request.known_ids, request.prefill_len - 1))
    return row


@fault(Reservations, "close", "0-1-4", "AssertionError: slots or rows are still held after the last request")
def forget_a_session(_, self):
    """Nobody gives the slots of a conversation back that nobody continued."""


@pytest.mark.parametrize(("inject", "name", "seen"), FAULTS.values(), ids=FAULTS)
def test_an_injected_fault_is_found_and_repeats_by_its_name(inject, name, seen, monkeypatch, call):
    with monkeypatch.context() as patched:
        inject(patched)
        result = soak(program=name)
        assert not result.is_ok
        ((program, difference, command),) = result.failures
        assert program == name
        assert command == f"specsim soak --program {name}"
        assert re.match(rf"(request|step) \d+: {seen}", difference)
        assert soak(program=name).failures == result.failures
        status, out, _ = call(*command.split()[1:])
        assert (status, name in out) == (1, True)
    assert soak(program=name).is_ok


def test_a_shared_tree_changes_rounds_and_no_token():
    """Without the recorded proposals other rounds are found; with them, all is equal, and what is not is found."""
    options = trial.options_of("reference")
    program = named("9-29-8")
    assert program.kind == SHARED, "with other drafters or verifiers the program is another: choose one of this kind"
    pair = pair_of(program.pair, options.dtype)
    proposals = {}
    schedulers = trial._schedulers(program, pair, options, proposals)
    with torch.inference_mode():
        trial._serve(program, Ranks(schedulers), pair.target.config)
        requests = [each for rank in schedulers for each in rank.requests.values() if each.token_ids]

        def compared() -> tuple[str, ...]:
            return ReplayedRuns(pair, program.config, options.dtype, proposals).compare(requests).differences

        assert compared() == ()
        unlike = solo.SoloRuns(pair, program.config, options.dtype).compare(requests).differences
        assert any(": accepted is" in each for each in unlike)
        greedy = next(each for each in requests if each.params.temperature == 0)
        greedy.token_ids[-1] ^= 1
        assert [each.split(" is")[0] for each in compared()] == [f"request {greedy.request_id}: token_ids"] * 2
        greedy.token_ids[-1] ^= 1
        other = next(each for each in requests if each.params.temperature > 0)
        other.accepted[0] += 1
        assert [each.split(" is")[0] for each in compared()] == [f"request {other.request_id}: accepted"]


def test_programs_have_settings_that_fit_their_drafters():
    assert {each.kind for each in PROGRAMS} == set(KINDS)
    drafting = [each for each in PROGRAMS if not each.config.is_plain]
    assert {each.config.verifier for each in drafting if each.kind in ("ngram", "suffix", SHARED)} == {
        kind.name for kind in VERIFIER_KINDS if kind.drafts == "best"
    }
    assert max(each.config.num_steps for each in drafting if each.kind == "mtp") == 3
    assert {each.kind for each in drafting if each.graph == "round"}.isdisjoint({"suffix", SHARED})
    chain = SpecConfig(topk=1)
    assert [possible_graph("round", kind, chain) for kind in ("mtp", "ngram", SHARED)] == ["round", "round", "phase"]
    assert possible_graph("round", "ngram", SpecConfig(topk=2)) == "phase"
    assert possible_graph("round", "eagle", SpecConfig(release="round")) == "phase"


@pytest.mark.parametrize("kind", KINDS)
def test_programs_of_each_drafter_have_ranks_sessions_and_pages(kind):
    own = [each for each in PROGRAMS if each.kind == kind and not each.config.is_plain]
    assert {each.num_ranks for each in own} == {1, 2, 3}
    assert {each.config.page_size for each in own} == {1, 2, 4, 16}
    assert any(
        each.continues is not None and program.submissions[each.continues].keep
        for program in own
        for each in program.submissions
    )


def test_a_failure_is_shown_with_the_command_that_repeats_it(monkeypatch):
    keep_draft_input(monkeypatch)
    result = soak(12, seed=0)
    failure = result.failures[0]
    assert result.total("mismatches") >= 1
    text = shown(result)
    assert f"{failure.program}: step" in text
    assert f"    {failure.command}\n" in text
    assert text.endswith("Not shown: that all requests equal their solo runs.\n")
    assert result.to_json()["failures"][0] == failure._asdict()


def test_requests_that_wait_for_ever_are_a_failure(monkeypatch):
    monkeypatch.setattr(Reservations, "admit", lambda self, request, admitted_requests: False)
    (failure,) = soak(program="0-0-4").failures
    assert "do not end" in failure.difference


# Coverage is required.


def result_of(counts: dict[str, int], num_steps: int = 2) -> Soak:
    programs = (ProgramResult("0-0-1", num_steps, counts),)
    return Soak("specsim soak", "", "cpu", programs, 1.0, date="2026-01-01T00:00:00+00:00", versions={"python": "3"})


ALL = dict.fromkeys((*REQUIRED_EVENTS, *(accepted_name(count, 2) for count in range(3))), 1) | {
    "requests": LEAST_REQUESTS,
    "compared": 1,
}


def test_a_run_that_went_through_everything_passes():
    result = result_of(ALL)
    assert (result.is_ok, result.missing) == (True, ())
    for counts in ({}, {"requests": 3}, ALL | {"compared": 0}):
        assert not result_of(counts).is_ok
    wrong = replace(result, programs=(replace(result.programs[0], mismatches=1),))
    assert [each.program for each in wrong.failures] == ["0-0-1"]  # also without a sentence
    assert result.to_json().items() >= {"date": result.date, "versions": result.versions}.items()


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"requests", "compared"}))
def test_a_required_event_that_never_occurs_fails(name):
    result = result_of(ALL | {name: 0})
    assert not result.is_ok
    assert result.missing == (name,)
    assert f"Not covered: {name}." in shown(result)
    assert json.loads(json.dumps(result.to_json()))["missing"] == [name]


def test_required_names_what_is_zero():
    """Every depth has its own accepted counts, and a short run has to go through nothing."""
    assert result_of(ALL, num_steps=3).missing == tuple(accepted_name(count, 3) for count in range(4))
    short = result_of({"requests": LEAST_REQUESTS - 1, "compared": 1})
    assert short.is_ok
    assert short.missing is short.to_json()["missing"] is None
    assert not result_of({"requests": LEAST_REQUESTS, "compared": 1}).is_ok
    counts = dict.fromkeys(REQUIRED, 3)
    assert required(counts) == ()
    assert required(counts | {"turns": 0}) == ("turns",)
    assert required(counts | {accepted_name(0, 1): 1}, {1}) == (accepted_name(1, 1),)


# What a scheduler went through.


def served(submissions: list[Submission], serving: ServingConfig, **config) -> tuple[Scheduler, dict[str, int]]:
    pair = make_pair("eagle3-llama")
    engine = load_engine(pair, SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, **config))
    scheduler = Scheduler(engine, serving, audits=True)
    with torch.inference_mode():
        for request_id, each in enumerate(submissions):
            scheduler.submit(each.request(request_id, pair.target.config))
        scheduler.run()
        counts = coverage_of(scheduler)
        scheduler.close()
    assert counts["audits"] == counts["steps"] == len(scheduler.trace)
    assert counts["slots audited"] == counts["steps"] * scheduler.pools.num_slots
    assert counts["requests"] == len(submissions)
    return scheduler, {name: count for name, count in counts.items() if count}


def asked(*prompt_ids: int, tokens: int = 6, **fields) -> Submission:
    return Submission(0, prompt_ids, SamplingParams(max_new_tokens=tokens), **fields)


TWO_CHUNKS = [asked(*range(7)), asked(3)]
ENDS = [asked(*range(9)), asked(1, abort_at=0), asked(2, abort_at=3, tokens=40), asked(*[1] * 600)]
# Requests, how they are served, the counts, and events that do not occur.
SERVED = {
    # The first turn finds what the request that it continues has left, the second finds it taken; the last is rejected.
    "turns": (
        [asked(1, 2, 3, 4, 5), *(asked(*ids, continues=0) for ids in ((7, 8), (9,), [1] * 600))],
        ServingConfig(),
        {"turns": 2, "turns on kept KV": 1, "rejected": 1, "finished length": 3},
        {"turns preempted", "shared pages"},
    ),
    "pages of the tree": (
        [asked(*range(9)), asked(*range(9), arrival=4)],
        ServingConfig(prefix_cache=True),
        {"shared pages": 2, "reused columns": 8},
        {"turns on kept KV"},
    ),
    "chunks that go on": (TWO_CHUNKS, ServingConfig(chunk_tokens=3), {"prefill chunks": 2}, set()),
    "whole prompts": (TWO_CHUNKS, ServingConfig(), {}, {"prefill chunks"}),
    "ends": (
        ENDS,
        ServingConfig(schedule="overlap"),
        {"finished length": 1, "finished abort": 2, "aborted": 2, "aborted with tokens": 1, "rejected": 1},
        set(),
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_events_are_counted(name):
    submissions, serving, expected, missing = SERVED[name]
    scheduler, counts = served(submissions, serving, page_size=4)
    assert counts.items() >= expected.items()
    assert missing.isdisjoint(counts)
    if name == "turns":
        assert counts["reused columns"] == scheduler.requests[0].prefill_len
    assert name != "ends" or counts["late results dropped"] >= 1


def test_preemptions_are_counted():
    """Two requests that fit at first, and not as they grow."""
    both = [asked(*range(9), tokens=20), asked(*range(5, 14), tokens=20, arrival=1)]
    scheduler, counts = served(both, ServingConfig(num_slots=48, schedule="overlap"), page_size=1)
    assert counts["preempted"] == counts["resumed"] == sum(each.num_preemptions for each in scheduler.requests.values())
    assert counts["preempted"] >= 1
    assert "preempted in a page" not in counts


def test_preempted_in_a_chunk_is_who_had_columns_and_not_all():
    scheduler, counts = served([asked(1, 2, 3)], ServingConfig())
    assert "preempted in a chunk" not in counts
    nothing_yet, some, all_of_it = (
        Preemption(0, *each) for each in ((0, False, True), (3, True, True), (3, True, False))
    )
    scheduler.trace.records[0] = replace(scheduler.trace.records[0], preempted=(nothing_yet, some, some, all_of_it))
    counts = coverage_of(scheduler)
    assert (counts["preempted"], counts["preempted in a page"], counts["preempted in a chunk"]) == (4, 3, 2)


def test_events_of_a_trace_by_hand():
    """Results of the same step were not unread, dropped results were not cut, and preempted requests restart."""
    scheduler, _ = served([asked(1, 2, 3)], ServingConfig())
    idle, gone = replace(scheduler.trace.records[0], **dict.fromkeys(EVENTS, ())), (Preemption(0, 4, False, False),)
    events = [
        {"admitted": (0,), "prefilled": (Chunk(0, 0, 2),)},
        {"prefilled": (Chunk(0, 2, 4),)},
        {"preempted": gone, "results": (DeliveredRound(0, 2, 3, 0),)},
        {"admitted": (0,), "prefilled": (Chunk(0, 0, 2),)},
        {"decoded": (0,)},
        {"preempted": gone, "results": (DeliveredRound(0, 4, 3, 2),)},
        {},
    ]
    scheduler.trace.records = [replace(idle, step=step, **each) for step, each in enumerate(events)]
    once = ("prefill chunks", "preempted with a result unread", "cut inside a path", "late results dropped")
    counts = coverage_of(scheduler)
    assert {name: counts[name] for name in (*once, "batches emptied")} == dict.fromkeys((*once, "batches emptied"), 1)


@pytest.mark.parametrize(("pair", "dtype"), [("eagle3-llama", "model"), ("eagle3-deepseek_v3", "fp8_e4m3")])
def test_what_nobody_may_read_is_poisoned(pair, dtype):
    pair = make_pair(pair)
    options = EngineOptions("reference", torch.float64, kv_dtype=dtype, draft_kv_dtype=dtype)
    scheduler = Scheduler(load_engine(pair, SpecConfig(page_size=4), options), ServingConfig(num_slots=256))
    scheduler.submit(asked(*range(9)).request(0, pair.target.config))
    with torch.inference_mode():
        scheduler.step()
        trial._poison(scheduler)
    length = scheduler.requests[0].prefill_len
    for buffer in (scheduler.pools.target, scheduler.pools.draft):
        keys, values = (part.float().isnan().flatten(2) for part in (buffer.keys, buffer.values))
        poisoned = keys.all(2).all(0)
        assert torch.equal(poisoned, values.any(2).any(0))
        assert int((~poisoned).sum()) == length
        assert not poisoned[scheduler.pools.slots(0, torch.arange(length))].any()


# Rounding, and what cannot run.


def alter_solo(monkeypatch, **changes):
    """Change the solo outputs, and let all their decisions be within rounding error."""
    run_solo = solo.run_solo

    def wrong(*arguments):
        output = run_solo(*arguments)
        return replace(output, **{name: change(getattr(output, name)) for name, change in changes.items()})

    monkeypatch.setattr(solo, "run_solo", wrong)
    monkeypatch.setattr(solo, "is_within_rounding_error", lambda *_: True)


def test_only_float32_may_leave_a_difference_undecided(monkeypatch, device):
    """A wrong logprob is never within rounding error."""
    pytest.importorskip("triton")
    fast = dict(impl="fast", device=device, graph="eager")
    with monkeypatch.context() as patched:
        alter_solo(patched, token_ids=lambda ids: (*ids[:-1], ids[-1] ^ 1))
        exact, rounded = soak(program="0-3-1"), soak(program="0-3-1", **fast)
    alter_solo(monkeypatch, logprobs=lambda values: tuple(value + 1 for value in values))
    wrong = soak(program="0-0-1", **fast)
    for result, counts in ((exact, (1, 0)), (rounded, (0, 1)), (wrong, (1, 0))):
        assert (result.total("mismatches"), result.total("within_rounding_error")) == counts
        assert result.is_ok == (result is rounded)
    assert rounded.command == f"specsim soak --program 0-3-1 --impl fast --device {device} --graph eager"
    assert "logprob 0 is" in wrong.failures[0].difference


@pytest.mark.parametrize(
    "name", ["0-8-2", *(pytest.param(name, marks=pytest.mark.whole) for name in ("0-69-2", "0-102-2"))]
)
def test_the_fast_column_serves(name, device):
    """A suffix chain under release `round`; trees of a block and over frozen KV under overlap."""
    pytest.importorskip("triton")
    result = soak(program=name, impl="fast", device=device)
    assert result.failures == ()
    assert result.counts["tokens"] > 0
    assert result.max_logprob_error > 0


def test_experts_of_a_preempted_request_are_delivered():
    """A result that was unread at the preemption ends the request."""
    assert named("0-21-16").pair == "p-eagle-qwen3_moe"
    result = soak(program="0-21-16")
    assert result.failures == ()
    assert result.counts["preempted with a result unread"] > 0


def test_wrong_experts_are_a_difference(monkeypatch):
    run_solo = solo.run_solo

    def wrong(*arguments):
        output = run_solo(*arguments)
        experts = output.side_outputs["experts"].clone()
        experts[1] += 1
        return replace(output, side_outputs={"experts": experts})

    monkeypatch.setattr(solo, "run_solo", wrong)
    result = soak(program="0-2-4")
    assert result.total("mismatches") > 0
    assert "side output experts of token 1 is" in result.failures[0].difference


@pytest.mark.parametrize(
    ("arguments", "named_as"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"num_requests": 2.5}, "num_requests"),
        ({"seed": -1}, "seed"),
        ({"jobs": 0}, "jobs"),
        ({"impl": "slow"}, "impl"),
        ({"impl": "reference", "device": "cuda"}, "device"),
        ({"impl": "reference", "graph": "round"}, "graph"),
        ({"impl": "fast", "graph": "square"}, "graph"),
        ({"program": "x"}, "program"),
        ({"program": ""}, "program"),
    ],
)
def test_bad_input_is_named_before_anything_runs(arguments, named_as):
    with pytest.raises(InputError, check=lambda error: error.name == named_as):
        soak(**{"num_requests": 4, **arguments})
