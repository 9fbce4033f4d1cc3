"""The HTTP server: answers equal to generate's, streams, sessions, ends of requests, metrics, and wrong input."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from threading import Event

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
import httpx
from starlette.testclient import TestClient

from specsim import SamplingParams, SpecConfig, generate
from specsim.acceptance.content import Content
from specsim.acceptance.sglang_metrics import read as read_sglang
from specsim.acceptance.vllm_metrics import read as read_vllm
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.models.load import load
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.http.app import create_app
from specsim.serving.http.limits import ServerLimits
from specsim.serving.http.server_engine import load_server_engine
from specsim.serving.http.service import Service

PAIR = load()
CHAIN = SpecConfig(topk=1, num_steps=3)
PROMPT = "def add(a, b):"
SERVING = ServingConfig(max_running=4, num_slots=4096, prefix_cache=True)


def started(engine=None, limits=None, **serving):
    engine = engine or load_server_engine(PAIR, CHAIN, EngineOptions())
    return Service(PAIR, engine, replace(SERVING, **serving), limits)


@pytest.fixture(scope="module")
def service():
    with started() as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        yield client


def outputs(prompts=(PROMPT,), config=CHAIN, ids=None, grammars=None, **sampling):
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return generate(PAIR, list(prompts), config, params, request_ids=ids, grammars=grammars).outputs


def complete(client, prompt=PROMPT, **body):
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 12, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def native(client, sampling=(), **body):
    sampling = {"max_new_tokens": 12, "temperature": 0, **dict(sampling)}
    answer = client.post("/generate", json={"text": PROMPT, "sampling_params": sampling, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, path, body):
    """Read the chunks of a stream."""
    with client.stream("POST", path, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_answers_are_the_outputs_of_generate(client, sampling):
    expected = outputs(**sampling)[0]
    choice = complete(client, logprobs=0, **sampling)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert choice["logprobs"]["token_logprobs"] == list(expected.logprobs)
    named = {"sampling_seed" if name == "seed" else name: value for name, value in sampling.items()}
    answer = native(client, named, return_logprob=True)
    assert answer["output_ids"] == list(expected.token_ids)
    assert [row[0] for row in answer["meta_info"]["output_token_logprobs"]] == list(expected.logprobs)
    assert answer["meta_info"]["spec_verify_ct"] == len(expected.num_accepted_tokens_per_round)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_request_turns_speculation_off(client, temperature):
    """Its tokens are those of plain decoding, sampled ones too, and it drafts nothing."""
    expected = outputs(config=SpecConfig.plain(), temperature=temperature, seed=3)[0]
    answer = native(client, {"temperature": temperature, "sampling_seed": 3}, speculative={"num_steps": 0})
    assert answer["output_ids"] == list(expected.token_ids)
    assert (answer["meta_info"]["spec_verify_ct"], answer["meta_info"]["spec_draft_token_num"]) == (11, 0)


def test_a_request_narrows_speculation(client):
    meta = native(client, speculative={"num_steps": 1})["meta_info"]
    assert meta["spec_draft_token_num"] == meta["spec_verify_ct"]


def test_requests_of_a_batch_have_their_own_draft_steps(client):
    prompts = [PROMPT, "import os", "class A:"]
    wanted = [{"num_steps": 0}, None, {"num_steps": 2}]
    answers = native(client, text=prompts, speculative=wanted)
    assert [answer["output_ids"] for answer in answers] == [list(output.token_ids) for output in outputs(prompts)]
    assert answers[0]["meta_info"]["spec_draft_token_num"] == 0 < answers[1]["meta_info"]["spec_draft_token_num"]


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_both_implementations_serve(impl):
    """Requests of one seed and random stream have the same tokens in a batch, and ids of their own."""
    pair, config = synthetic_pair(), SpecConfig(topk=1, num_steps=2, verifier="rejection")
    params, options = SamplingParams(temperature=1.0, seed=9, max_new_tokens=6), EngineOptions(impl)
    expected = generate(pair, [[5, 6, 7]], config, params, engine=options).outputs[0]
    sampling = {"temperature": 1.0, "sampling_seed": 9, "max_new_tokens": 6}
    body = {"input_ids": [[5, 6, 7]] * 2, "sampling_params": sampling}
    service = Service(pair, load_server_engine(pair, config, options), replace(SERVING, num_slots=512))
    with service, TestClient(create_app(service)) as client:
        answers = client.post("/generate", json=body).json()
    assert [answer["output_ids"] for answer in answers] == [list(expected.token_ids)] * 2


def test_choices_differ_in_their_random_stream(client):
    expected = outputs([PROMPT] * 3, ids=range(3), temperature=1.0, seed=7)
    answer = complete(client, n=3, seed=7, temperature=1.0)
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected]
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == len(expected[0].prompt_token_ids)


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": ("copy",)},
        {"stop_regex": ("co.y",)},
        {"stop_token_ids": (279,)},
        {"logit_bias": {266: -100.0}},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.3},
    ],
)
def test_parameters_are_those_of_generate(client, sampling):
    expected = outputs(**sampling)[0]
    body = {name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()}
    choice = complete(client, return_token_ids=True, **body)["choices"][0]
    assert choice["token_ids"] == list(expected.token_ids)
    assert choice["finish_reason"] == expected.finish_reason
    if "stop" in sampling:
        assert (choice["text"], choice["matched_stop"]) == (expected.text, "copy")
    if "stop_regex" in sampling:
        assert (choice["text"], choice["matched_stop"]) == (expected.text, "co.y")
        assert re.search("co.y", choice["text"])


@pytest.mark.parametrize("stop", [[], ["copy"]])
def test_streams_join_to_the_same_text(client, stop):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stop": stop}
    expected = complete(client, **body)["choices"][0]["text"]
    parts = events(client, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert parts.pop()["usage"]["completion_tokens"] > 0
    assert len(parts) > 1
    assert "".join(part["choices"][0]["text"] for part in parts) == expected
    chat = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24, "stop": stop}
    whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    deltas = events(client, "/v1/chat/completions", {**chat, "stream": True, "logprobs": True, "top_logprobs": 1})
    assert "".join(part["choices"][0]["delta"]["content"] for part in deltas) == whole


def test_native_streams_hold_all_of_the_text_so_far(client):
    parts = events(client, "/generate", {"text": PROMPT, "sampling_params": {"temperature": 0}, "stream": True})
    texts = [part["text"] for part in parts]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


def test_alternatives_agree_with_the_tokens(client):
    meta = native(client, return_logprob=True, logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=[5])
    meta = meta["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert [rows[0] for rows in meta["output_top_logprobs"]] == meta["output_token_logprobs"]  # greedy
    assert all(row[0] >= listed[0][0] for row, listed in zip(
        meta["output_token_logprobs"], meta["output_token_ids_logprobs"], strict=True))  # fmt: skip
    scored = native(
        client, {"max_new_tokens": 0}, text=None, return_logprob=True, logprob_start_len=0,
        input_ids=[row[1] for row in meta["input_token_logprobs"] + meta["output_token_logprobs"]],
    )["meta_info"]  # fmt: skip
    assert scored["completion_tokens"] == 0
    scores = [row[0] for row in scored["input_token_logprobs"][meta["prompt_tokens"] :]]
    assert scores == pytest.approx([row[0] for row in meta["output_token_logprobs"]], abs=1e-4)
    echo = complete(client, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert echo["text"].startswith(PROMPT)
    assert echo["logprobs"]["token_logprobs"][1 : meta["prompt_tokens"]] == pytest.approx(
        [row[0] for row in meta["input_token_logprobs"][1:]], abs=1e-5
    )


@pytest.mark.skipif("llguidance" not in sys.modules and not pytest.importorskip("llguidance"), reason="no llguidance")
def test_structured_outputs_match(client):
    assert re.fullmatch(r"[a-z]+ \d\d", complete(client, regex=r"[a-z]{3,5} \d\d", max_tokens=40)["choices"][0]["text"])
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "response_format": form}
    answer = client.post("/v1/chat/completions", json=body | {"temperature": 0, "max_tokens": 100}).json()
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["a"], int)
    short = native(client, {"ebnf": 'root ::= "a" | "b"'})
    assert short["text"] in ("a", "b")
    assert native(client, {"regex": "a+", "min_new_tokens": 9})["meta_info"]["completion_tokens"] >= 9


def usage(client):
    return client.portal.call(client.app.state.service.run, lambda scheduler: scheduler.pools.audit())


def free_of_requests(client):
    """Flush the cache, and check that every slot is free."""
    assert client.post("/flush_cache").status_code == 200
    counts = usage(client)
    return counts["free"] == counts["slots"] and counts["requests"] == 0


def test_a_client_that_leaves_ends_its_request(service, client):
    app = create_app(service)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}

    async def leave():
        messages = iter([{"type": "http.request", "body": body}])

        async def receive():
            if (message := next(messages, None)) is not None:
                return message
            while not await service.run(lambda scheduler: len(scheduler.runner.requests)):
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        while service.num_open:
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert free_of_requests(client)


def test_requests_are_aborted_by_name_or_all(service, client):
    async def ask(names):
        from specsim.serving.http.native import read_generate

        sampling = {"max_new_tokens": 1900, "ignore_eos": True}
        body = {"input_ids": [[5], [6]], "rid": ["a", "b"], "sampling_params": sampling}
        ticket = service.submit(read_generate(service, body).asks)
        for name in names:
            service.abort_named(name)
        if not names:
            service.abort()
        return [progress.request.finish_reason for progress in await ticket.results()]

    assert asyncio.run(ask(["b", "a"])) == ["abort", "abort"]
    assert asyncio.run(ask([])) == ["abort", "abort"]
    assert free_of_requests(client)


def test_turns_of_a_session_keep_their_kv(client):
    assert client.post("/flush_cache").status_code == 200
    session = client.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    total, rid = 0, None
    for turn in range(3):
        params = {"id": session, "rid": rid}
        scored = {"return_logprob": True, "logprob_start_len": 0}
        answer = native(client, {"max_new_tokens": 5}, text=f" x{turn} =", session_params=params, **scored)["meta_info"]
        assert len(answer["input_token_logprobs"]) == answer["prompt_tokens"]
        assert answer["cached_tokens"] in (total, total - 1) or not turn
        assert answer["prompt_tokens"] > total
        total, rid = answer["prompt_tokens"] + answer["completion_tokens"], answer["id"]
    refused = {"text": "x " * 2500, "session_params": {"id": session}}
    answer = client.post("/generate", json=refused)
    assert answer.status_code == 400
    assert "context length" in answer.text
    assert native(client, text=" y", session_params={"id": session})["meta_info"]["cached_tokens"] >= total - 1
    assert client.post("/close_session", json={"session_id": session}).status_code == 200
    assert free_of_requests(client)


def test_a_turn_continues_part_of_a_session(client):
    """Its prompt is the part of the earlier turns that stays, with the answer that the same prompt has alone."""
    assert client.post("/flush_cache").status_code == 200
    session = client.post("/open_session", json={}).json()
    answer, prompt = {"output_ids": [], "meta_info": {"id": None}}, []
    for params, part in (
        ({"replace": True}, lambda known, _: known),
        ({"offset": 4}, lambda known, _: known[:4]),
        ({"offset": 0}, lambda known, _: known),
        ({"offset": -2, "replace": True}, lambda known, _: known[:-2]),
        ({"drop_previous_output": True}, lambda _, prompt: prompt),
    ):
        prompt = [*part([*prompt, *answer["output_ids"]], prompt), 80, 81, 82]
        params = {"id": session, "rid": answer["meta_info"]["id"], **params}
        answer = native(client, {"max_new_tokens": 6}, text=None, input_ids=[80, 81, 82], session_params=params)
        assert answer["meta_info"]["prompt_tokens"] == len(prompt)
        alone = native(client, {"max_new_tokens": 6}, text=None, input_ids=prompt)
        assert answer["output_ids"] == alone["output_ids"], params
    for wrong in ({"rid": "x"}, {"offset": 999}, {"offset": True}, {"replace": True}):
        refused = client.post("/generate", json={"text": "a", "session_params": {"id": session, **wrong}})
        assert (refused.status_code, refused.json()["param"]) == (400, next(iter(wrong)))
    assert client.post("/close_session", json={"session_id": session}).status_code == 200
    assert free_of_requests(client)


@pytest.mark.parametrize("change", [{"offset": 1}, {"drop_previous_output": True}])
def test_a_streaming_session_only_appends(client, change):
    session = client.post("/open_session", json={"streaming": True}).json()
    native(client, {"max_new_tokens": 1}, session_params={"id": session})
    refused = client.post("/generate", json={"text": "a", "session_params": {"id": session, **change}})
    assert (refused.status_code, refused.json()["param"]) == (400, "session_params")
    assert client.post("/close_session", json={"session_id": session}).status_code == 200


def test_metrics_add_up():
    with started() as service, TestClient(create_app(service)) as client:
        metas = [native(client, {"max_new_tokens": count})["meta_info"] for count in (5, 20)]
        native(client, speculative={"num_steps": 0})
        page = client.get("/metrics").text
        state = client.get("/get_server_info").json()["internal_states"][0]
    (vllm,), (sglang,) = read_vllm(Content.of_text(page, "page")), read_sglang(Content.of_text(page, "page"))
    (counts,) = vllm.counts
    assert counts.rounds == sum(meta["spec_verify_ct"] for meta in metas)
    assert counts.accepted_drafts == sum(meta["spec_accept_token_num"] for meta in metas) == sum(counts.by_position)
    assert vllm.proposed_drafts == sum(meta["spec_draft_token_num"] for meta in metas)
    assert sglang.accept_length == state["avg_spec_accept_length"] == pytest.approx(vllm.accept_length)
    assert "vllm:generation_tokens_total" in page
    assert 'sglang:num_requests_total{model_name="tiny"} 3.0' in page


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [4096]}, "prompt"),
        ("/v1/completions", {"prompt": "x " * 2500}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "a", "stop": 5}, "stop"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "speculative": {"num_steps": 9}}, "num_steps"),
        ("/v1/completions", {"prompt": "a", "speculative": 0}, "speculative"),
        ("/v1/completions", {"prompt": "a", "stop_regex": "("}, "stop_regex"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "regex": "("}, "regex"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1000}, "logprobs"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "top_logprobs"),
        ("/generate", {"text": "a", "sampling_params": 5}, "sampling_params"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ("/generate", {"text": "a", "session_params": {"id": "none"}}, "session_params"),
        ("/generate", {"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ("/close_session", {"session_id": 5}, "session_id"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(client, path, body, param):
    answer = client.post(path, json=body)
    value = answer.json()
    error = value["error"] if path.startswith("/v1/") else value
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, param)
    assert param in error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in answer.text


def test_bodies_and_paths_that_are_wrong(client):
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
        assert client.post("/generate", content=body).json()["param"] == "body"
    assert client.post("/v1/nothing", json={}).status_code == 404
    assert client.get("/generate").status_code == 405
    assert client.get("/health_generate").status_code == 200


def test_limits_of_body_queue_and_time():
    limits = ServerLimits(queue=1, body=2000, queue_seconds=0.0)
    with started(limits=limits, max_running=1) as service, TestClient(create_app(service)) as client:
        assert client.post("/generate", json={"text": "x" * 3000}).status_code == 413
        assert client.post("/v1/completions", json={"prompt": ["a"] * 3}).status_code == 429
        late = client.post("/v1/completions", json={"prompt": ["a", "b"], "temperature": 0})
        assert (late.status_code, late.json()["error"]["code"]) == (503, 503)
        service.limits = ServerLimits(request_seconds=0.3)
        late = client.post(
            "/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
        )
        assert (late.status_code, late.json()["message"]) == (503, "the request ran longer than 0.3 s")
        service.limits = ServerLimits()  # the other prompt may still run, so that the next one waits for its end
        assert complete(client, max_tokens=2)["choices"][0]["finish_reason"] == "length"


class HeldEngine:
    """An engine whose third round waits; it counts rounds, and the most prompt tokens of a step."""

    def __init__(self, engine):
        self._engine = engine
        self.num_rounds, self.most_rows = 0, 0
        self.waits, self.goes_on = Event(), Event()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, batch, prefill, pools):
        self.most_rows = max(self.most_rows, len(prefill.input_ids))
        return self._engine.prefill(batch, prefill, pools)

    def advance(self, *arguments, **named):
        self.num_rounds += 1
        if self.num_rounds == 3:
            self.waits.set()
            assert self.goes_on.wait(60)
        return self._engine.advance(*arguments, **named)


def test_aborts_wait_for_no_further_step():
    """However many requests run and wait, the step that runs is the last, and has few prompt tokens."""
    engine = HeldEngine(load_server_engine(PAIR, CHAIN, EngineOptions()))

    async def aborted(service):
        from specsim.serving.http.native import read_generate

        body = {"input_ids": [[5] * 100] * 40, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
        ticket = service.submit(read_generate(service, body).asks)
        assert await asyncio.to_thread(engine.waits.wait, 60)
        service.abort()
        engine.goes_on.set()
        return {progress.request.finish_reason for progress in await ticket.results()}

    with started(engine, chunk_tokens=64) as service:
        assert asyncio.run(aborted(service)) == {"abort"}
    assert engine.num_rounds == 3
    assert engine.most_rows <= 64


def test_no_request_waits_for_the_grammar_of_another(monkeypatch):
    asked, made = Event(), Event()

    async def answers(service):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://s") as client:
            body = {"prompt": "a", "max_tokens": 2, "regex": "a+"}
            slow = asyncio.create_task(client.post("/v1/completions", json=body))
            assert await asyncio.to_thread(asked.wait, 60)
            quick = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            made.set()
            return quick.status_code, (await slow).status_code

    def grammar(*_):
        asked.set()
        assert made.wait(60)

    with started() as service:
        monkeypatch.setattr(service, "grammar", grammar)
        assert asyncio.run(answers(service)) == (200, 200)


def test_a_service_loads_its_tokenizer_before_the_first_request():
    pair = load()
    assert pair.tokenizer._loaded is None
    with Service(pair, load_server_engine(pair, CHAIN, EngineOptions()), SERVING):
        assert pair.tokenizer._loaded is not None


class FailingEngine:
    """An engine whose next rounds fail."""

    def __init__(self, engine):
        self._engine = engine
        self.num_failures = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def advance(self, *arguments, **named):
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("Traceback: a secret path")
        return self._engine.advance(*arguments, **named)


def test_a_failed_step_is_told_and_the_server_goes_on():
    engine = FailingEngine(load_server_engine(PAIR, CHAIN, EngineOptions()))
    with started(engine) as service, TestClient(create_app(service)) as client:
        engine.num_failures = 1
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)
        assert "secret" not in answer.text
        assert complete(client)["choices"][0]["text"] == outputs()[0].text


def test_a_signal_ends_the_command_in_order():
    code = "import sys; from specsim.cli.main import main; main()"
    arguments = [sys.executable, "-c", code, "serve", "--port", "0", "--slots", "2048"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert re.fullmatch(r"tiny, eagle3 at http://127\.0\.0\.1:\d+\n", process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "no production server" in errors
    assert "Traceback" not in errors


def test_streams_hold_back_what_may_become_a_stop_string():
    from specsim.serving.http.job import _streamable

    assert [_streamable(text, ("stop", "to")) for text in ("a s", "a st", "a sto", "a b", "")] == [
        "a ",
        "a ",
        "a ",
        "a b",
        "",
    ]
    assert _streamable("text", ()) == "text"
