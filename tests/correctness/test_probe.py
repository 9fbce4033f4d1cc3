"""specsim probe: servers that cannot be used."""

import asyncio
import json

import httpx
import pytest

from specsim.core.errors import InputError
from specsim.correctness.explain import Noise
from specsim.correctness.probe import Connection, ProbeReport, ProbeSettings, Server, probe

KEY = "sk-secret"
SETTINGS = ProbeSettings(Noise.of("float32"), prompts=("ab",), max_tokens=8, samples=16)


def answer(**changes):
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.7], "top_logprobs": [{"a": -0.5}, {"b": -0.7}]}
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": logprobs}
    return {"model": "m", "choices": [choice | changes.pop("choice", {})]} | changes


def run(respond, **settings):
    """Probe a server whose responses to completions a function gives."""

    async def handle(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return await respond(request) if asyncio.iscoroutinefunction(respond) else respond(request)

    connection = Connection(**{"key": KEY, "timeout": 5.0} | settings)
    report = ProbeReport("u", None)
    with Server("http://user:word@server:1/v1/", connection, transport=httpx.MockTransport(handle)) as server:
        probe(report, server, None, SETTINGS, ["repeat", "stream", "usage"])
    return report


def down(request):
    raise httpx.ConnectError(f"no {KEY}")


async def slow(request):
    await asyncio.sleep(60)


def of_other_models(request):
    name = "b" if json.loads(request.content)["max_tokens"] == 1 else "a"
    return httpx.Response(200, json=answer(model=name))


def nonsense_stream(request):
    if json.loads(request.content).get("stream"):
        return httpx.Response(200, text="data: {\n\ndata: what\n\n")
    return httpx.Response(200, json=answer())


BAD = {
    "down": (down, "url"),
    "slow": (slow, "timeout"),
    "no logprobs": (lambda _: httpx.Response(200, json=answer(choice={"logprobs": None})), "url"),
    "other model": (of_other_models, "url"),
    "nonsense stream": (nonsense_stream, "url"),
    "no JSON": (lambda _: httpx.Response(200, text="<html>"), "url"),
    "a list": (lambda _: httpx.Response(200, json=[1]), "url"),
    "no key": (lambda _: httpx.Response(401, json={"error": KEY}), "api_key_variable"),
    "refusal": (lambda _: httpx.Response(400, json={"error": {"message": f"{KEY} is bad"}}), "url"),
    "redirect": (lambda _: httpx.Response(307, headers={"location": "/"}), "url"),
    "busy": (lambda _: httpx.Response(503, json={"error": "busy"}), "url"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_cannot_be_used_is_one_sentence(name):
    respond, field = BAD[name]
    with pytest.raises(InputError) as caught:
        run(respond, timeout=0.2 if name == "slow" else 5.0)
    assert caught.value.name == field
    for secret in (KEY, "user", "word@"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("url", ["server", "ftp://server", "http://", "http://server:port", "http://server/?key=1"])
def test_an_address_that_none_has(url):
    with pytest.raises(InputError, match="url is"):
        Server(url, Connection())
