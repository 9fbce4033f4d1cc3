"""Reports of a run, and the same requests served in four modes against their solo runs."""

import json
from dataclasses import asdict, replace
from io import StringIO

import pytest
import torch
from rich.console import Console

import specsim.correctness.invariance.solo
from specsim import InputError, SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.metrics import latency
from specsim.core.pair import Pair
from specsim.core.pool import KVPool
from specsim.core.token_drafter import Proposal, SuffixConfig
from specsim.correctness.invariance.modes import MODES, compare
from specsim.correctness.invariance.replay import ReplayingDrafter
from specsim.correctness.invariance.solo import SoloRuns
from specsim.models.load import load
from specsim.models.shipped import REQUESTS
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import make_request
from specsim.serving.serve import serve
from specsim.serving.trace import Trace
from specsim.serving.workload import ParsedRequests, read_requests

PAIR = synthetic_pair()
CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4)
SERVING = ServingConfig(max_running=3, num_slots=96, chunk_tokens=8)
PREFIX = [5, 9, 3, 7, 1, 8, 2, 6, 4, 11]


def request(request_id: int, prompt=(1, 2, 3), max_new_tokens: int = 5, pair=PAIR, **place):
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return make_request(pair.target.config, pair.tokenizer, request_id, prompt, params, **place)


def some_requests() -> list:
    return [
        request(0, [*PREFIX, 12]),
        request(1, [*PREFIX, 13], arrival=1),
        request(2, [14, 15], continues=0),
        request(3, abort_at=2, max_new_tokens=20),
        request(4, PREFIX, arrival=3, priority=1),
    ]


def engine(config: SpecConfig = CONFIG, dtype=torch.float64, pair=PAIR):
    return load_engine(pair, config, EngineOptions("reference", dtype))


def shown(result) -> str:
    console = Console(file=StringIO(), width=100, markup=False, emoji=False, highlight=False)
    result.show(console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def served():
    return serve(engine(), some_requests(), replace(SERVING, prefix_cache=True), skipped=[(7, "a line")])


def totals_of(requests, serving: ServingConfig, page_size: int) -> dict:
    """Compute totals of plain decoding, which has one token a round and can be counted by hand."""
    return serve(engine(SpecConfig.plain(page_size)), requests, serving).totals


def test_totals_of_a_chunked_prompt_a_turn_and_an_abort():
    """Request 1 waits for the place of request 3.

    Request 2 finds all but the last of the 8 earlier tokens.
    """
    requests = [
        request(0, [1, 2, 3, 4, 5], 3),  # prefilled in steps 0 and 1, rounds in 1 and 2
        request(1, [5, 6], 2, arrival=1),  # prefill and round in step 2
        request(2, [9], 2, continues=0),  # prefill and round in step 3
        request(3, [1, 2, 3], 20, abort_at=2),  # prefill and round in step 1
    ]
    totals = totals_of(requests, ServingConfig(max_running=2, num_slots=96, chunk_tokens=4), page_size=4)
    assert (totals["requests"], totals["finish_reasons"]) == (4, {"abort": 1, "length": 3})
    assert (totals["steps"], totals["prefill_steps"], totals["rounds"]) == (4, 4, 2 + 1 + 1 + 1)
    assert (totals["num_prefilled"], totals["num_reused"]) == (5 + 3 + 2 + 2, 7)
    assert (totals["num_preemptions"], totals["num_aborts"], totals["tokens"]) == (0, 1, 3 + 2 + 2 + 2)
    assert totals["tokens_per_s"] == 9 / totals["seconds"]


def test_totals_of_a_preemption():
    """A request of L columns owns L + 2 for two rounds.

    So 10 slots are enough for two requests of 3 columns, not of 4.
    """
    requests = [request(0, [1, 2, 3], 4), request(1, [4, 5, 6], 4)]
    totals = totals_of(requests, ServingConfig(num_slots=10), page_size=1)
    assert (totals["steps"], totals["prefill_steps"], totals["rounds"]) == (3 + 2, 2, 3 + 3)
    assert (totals["num_prefilled"], totals["num_reused"]) == (3 + 3 + 4, 0)
    assert (totals["num_preemptions"], totals["num_aborts"], totals["evicted_pages"]) == (1, 0, 0)
    assert (totals["finish_reasons"], totals["tokens"]) == ({"length": 2}, 8)


def test_every_step_and_the_end_are_audited(monkeypatch):
    audited, audit = [], KVPool.audit

    def counted(pool):
        audited.append(pool.num_slots)
        return audit(pool)

    monkeypatch.setattr(KVPool, "audit", counted)
    served = serve(engine(), some_requests(), SERVING)
    audit = served.audit
    assert len(audited) == audit.num_audits == len(served.trace) + 1
    assert sum(audited) == audit.audited_slots
    assert set(audited) == {SERVING.num_slots}
    assert audit.at_end["free"] == audit.at_end["slots"] == SERVING.num_slots
    assert audit.at_end["requests"] == 0


def test_json_has_the_result_of_each_request(served):
    value = json.loads(json.dumps(served.to_json(), allow_nan=False))
    for output, each in zip(value["outputs"], served.requests, strict=True):
        assert (output["id"], output["token_ids"]) == (each.request_id, each.token_ids)
        assert (output["logprobs"], output["finish_reason"]) == (each.logprobs, each.finish_reason)
        assert output["num_accepted_tokens_per_round"] == each.accepted
        assert (output["num_reused"], output["num_preemptions"]) == (each.num_reused, each.num_preemptions)
        assert output["prompt_tokens"] == len(each.prompt_ids)
        places = (each.arrival, each.priority, each.continues)
        assert (output["arrival"], output["priority"], output["continues"]) == places
        assert [tuple(emission) for emission in output["emissions"]] == each.emissions
        times = asdict(latency(each.arrived, each.emissions))
        assert output["latency"] == {name: None if time != time else time for name, time in times.items()}
    assert value["serving"] == asdict(served.serving)
    assert value["config"] == asdict(served.config)
    assert value["audit"] == asdict(served.audit)
    assert value["skipped"] == [{"line": 7, "reason": "a line"}]
    assert [output["continues"] for output in value["outputs"]] == [None, None, 0, None, None]
    assert Trace.from_json(value["trace"]) == served.trace


def test_a_solo_request_is_answered_in_its_step():
    (output,) = serve(engine(), [request(0, arrival=3)]).to_json()["outputs"]
    rounds = len(output["num_accepted_tokens_per_round"])
    assert (output["latency"]["ttft_steps"], output["latency"]["e2e_steps"]) == (1, rounds)
    assert output["latency"]["tpot_steps"] == (rounds - 1) / (len(output["token_ids"]) - 1)


def test_steps_in_which_nothing_happens_are_skipped():
    assert len(serve(engine(), [request(0), request(1, arrival=10**9)]).trace) < 20


def test_no_progress_is_shown_by_default(capsys):
    serve(engine(), [request(0)])
    assert capsys.readouterr() == ("", "")


def test_tables_name_everything(served):
    lines = [line.rstrip() for line in shown(served).splitlines()]
    head = "id prompt reused new finish rounds TTFT TPOT ITL preempted text"
    rows = lines[next(index for index, line in enumerate(lines) if line.split() == head.split()) + 1 :]
    for row, each in zip(rows, served.requests, strict=False):
        assert row.split()[:5] == list(
            map(str, (each.request_id, len(each.prompt_ids), each.num_reused, len(each.token_ids), each.finish_reason))
        )
    totals = dict(line.split("  ", 1) for line in lines if "  " in line)
    assert totals["requests"].strip() == "5: 1 abort, 4 length"
    assert totals["steps with prefill"].strip() == str(served.totals["prefill_steps"])
    assert totals["serving"].strip() == "sync, with prefix cache, at most 3 at a time"
    assert "Line 7 is skipped: not a line." in lines
    audit = f"{len(served.trace) + 1} audits accounted for 96 slots each; after the last request 96 are free."
    assert lines[-1] == audit


def test_tables_fit_whatever_the_texts_hold():
    pair = load()
    prompts = ["def f():\n\treturn '\x1b[31m", "x = " * 90]
    requests = [request(2**32 - 1 - index, prompt, 40, pair) for index, prompt in enumerate(prompts)]
    text = shown(serve(engine(pair=pair, dtype=torch.float32), requests))
    assert max(map(len, text.splitlines())) <= 100
    assert not set(text) & {"\x1b", "\t", "\r"}
    assert sum(str(2**32 - 1 - index) in text for index in range(2)) == 2


def test_requests_that_can_never_run_are_reported():
    result = serve(engine(), [request(0, [1] * 200, 50)], replace(SERVING, num_slots=8))
    assert result.totals["finish_reasons"] == {"rejected": 1}
    text = " ".join(shown(result).split())
    assert f"Request 0 is rejected: {result.requests[0].error}." in text
    assert "accept length" not in text
    assert result.to_json()["outputs"][0]["error"] == result.requests[0].error


def test_plain_decoding_shows_no_drafts():
    text = shown(serve(engine(SpecConfig.plain()), [request(0)]))
    assert "plain decoding" in text
    assert "accept" not in text


@pytest.mark.parametrize(
    ("config", "serving", "name"),
    [
        (CONFIG, ServingConfig(num_slots=3), "num_slots"),
        (replace(CONFIG, release="round"), ServingConfig("overlap"), "schedule"),
    ],
)
def test_settings_that_an_engine_cannot_serve_are_refused(config, serving, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        serve(engine(config), [request(0)], serving)


def comparison(requests=some_requests, dtype=torch.float64, serving=SERVING):
    return compare(PAIR, engine(dtype=dtype), lambda: ParsedRequests(requests(), [(2, "a line")]), serving)


def test_every_mode_equals_the_solo_run_of_each_request(monkeypatch):
    run_solo = specsim.correctness.invariance.solo.run_solo
    asked = []
    monkeypatch.setattr(
        specsim.correctness.invariance.solo, "run_solo", lambda *args: asked.append(1) or run_solo(*args)
    )
    result = comparison()
    assert result.is_equal
    assert [{name: getattr(mode.served.serving, name) for name in MODES[0]} for mode in result.modes] == list(MODES)
    assert {(mode.requests.num_compared, mode.requests.num_equal) for mode in result.modes} == {(5, 5)}
    assert all(mode.served.serving.max_running == SERVING.max_running for mode in result.modes)
    assert len(asked) == result.num_solo == 5
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert [mode["mode"] for mode in value["modes"]] == [
        "sync",
        "sync, prefix cache",
        "overlap",
        "overlap, prefix cache",
    ]
    assert value["is_equal"] is True
    text = shown(result)
    assert text.count("5 of 5") == 4
    assert "Line 2 is skipped: not a line." in text
    assert "Equal: tokens" in text
    assert max(map(len, text.splitlines())) <= 100


class MostRecentEnd:
    """A drafter of a user's own that proposes the end of the output that finished last."""

    def __init__(self):
        self.last = []

    def propose(self, request_id, tokens, limits):
        drafts = self.last[-limits.max_depth :]
        return Proposal(drafts, list(range(-1, len(drafts) - 1)), [1.0] * len(drafts))

    def finish(self, request_id, tokens, prompt_len):
        self.last = list(tokens)


def repeated_requests() -> list:
    """Make requests whose outputs are alike, so that a finished one is a good draft of the next."""
    warm = SamplingParams(max_new_tokens=16, temperature=0.5, seed=3)
    sampled = make_request(PAIR.target.config, None, 3, PREFIX, warm, arrival=60)
    return [*(request(number, PREFIX, 16, arrival=20 * number) for number in range(3)), sampled]


def looked_up(pair, drafter):
    """Make the pair with a drafter of tokens next to its own one."""
    return replace(pair, lookup=drafter)


@pytest.mark.parametrize("with_drafter", [Pair.with_drafter, looked_up])
@pytest.mark.parametrize("make", [SuffixConfig, MostRecentEnd])
def test_drafts_from_other_requests_are_replayed_solo(monkeypatch, make, with_drafter):
    """Rounds of a solo run without them would differ; with the drafts of each mode everything is compared."""
    pair = with_drafter(PAIR, make())
    config = SpecConfig(topk=1, num_steps=3, page_size=4)

    def compared():
        return compare(
            pair,
            engine(config, pair=pair),
            lambda: ParsedRequests(repeated_requests(), []),
            ServingConfig(num_slots=160),
        )

    result = compared()
    assert (result.is_equal, result.is_replayed) == (True, True)
    assert result.num_solo == len(MODES) * 4 + 3  # with each mode's drafts, and greedy ones with their own
    alone = [
        difference
        for each in result.modes[0].served.requests
        for difference in SoloRuns(with_drafter(PAIR, make()), config, torch.float64).compare([each]).differences
    ]
    assert any("accepted is" in each for each in alone)
    assert "solo runs repeat each mode's drafts" in " ".join(shown(result).split())
    monkeypatch.setattr(ReplayingDrafter, "propose", lambda *_: Proposal([], [], []))
    assert not compared().is_equal


def test_a_turn_after_an_abort_is_compared_with_its_own_prompt():
    def requests():
        return [request(0, PREFIX, 30, abort_at=4), request(1, [2], continues=0), request(2, max_new_tokens=9)]

    result = comparison(requests)
    prompts = {tuple(mode.served.requests[1].prompt_ids) for mode in result.modes}
    assert result.is_equal
    assert len(prompts) > 1
    assert result.num_solo == 2 + len(prompts)


def test_rejected_requests_are_not_compared():
    result = comparison(lambda: [request(0), request(1, [1] * 20, 90)])
    assert {(mode.requests.num_compared, mode.requests.num_equal) for mode in result.modes} == {(1, 1)}


@pytest.mark.every_value
@pytest.mark.parametrize("field", ["token_ids", "logprobs", "finish_reason", "num_accepted_tokens_per_round"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_fails_unless_within_rounding_error(monkeypatch, field, dtype):
    run_solo = specsim.correctness.invariance.solo.run_solo

    def other(pair, config, asked, *others):
        output = run_solo(pair, config, asked, *others)
        value = getattr(output, field)
        changed = "stop" if field == "finish_reason" else (*value[:-1], value[-1] + 1)
        return replace(output, **{field: changed}) if asked.request_id == 1 else output

    monkeypatch.setattr(specsim.correctness.invariance.solo, "run_solo", other)
    monkeypatch.setattr(specsim.correctness.invariance.solo, "is_within_rounding_error", lambda *_: False)
    result = comparison(dtype=dtype)
    assert not result.is_equal
    assert all(len(mode.requests.differences) == 1 and mode.requests.num_equal == 4 for mode in result.modes)
    assert "NOT equal" in shown(result)
    assert "sync, prefix cache: request 1: " in " ".join(shown(result).split())
    monkeypatch.setattr(specsim.correctness.invariance.solo, "is_within_rounding_error", lambda *_: True)
    result = comparison(dtype=dtype)
    assert result.is_equal == (dtype == torch.float32 and field != "logprobs")
    if result.is_equal:
        assert all(
            mode.requests.within_rounding_error == (1,) and mode.requests.num_equal == 4 for mode in result.modes
        )
        assert "within rounding error in request 1," in " ".join(shown(result).split())


@pytest.mark.parametrize(
    ("config", "dtype", "name"),
    [(replace(CONFIG, release="round"), torch.float64, "release"), (CONFIG, torch.bfloat16, "dtype")],
)
def test_runs_that_cannot_be_compared_are_refused(config, dtype, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        compare(PAIR, engine(config, dtype), lambda: ParsedRequests([request(0)], []))


def test_shipped_requests_are_equal_in_four_modes():
    pair, serving = load(), ServingConfig(num_slots=896, chunk_tokens=24)
    column = engine(SpecConfig(), torch.float32, pair)
    result = compare(pair, column, lambda: read_requests(REQUESTS, pair), serving)
    assert result.is_equal
    assert {mode.requests.num_equal for mode in result.modes} == {14}
    sync, sync_cached, overlap, overlap_cached = (mode.served for mode in result.modes)
    assert sync_cached.totals["prefill_steps"] < sync.totals["prefill_steps"]
    assert overlap_cached.totals["prefill_steps"] < overlap.totals["prefill_steps"]
    assert all(mode.served.totals["num_preemptions"] for mode in result.modes)
    served = [[each.token_ids for each in run.requests if each.finish_reason != "abort"] for run in (sync, overlap)]
    assert served[0] == served[1]
