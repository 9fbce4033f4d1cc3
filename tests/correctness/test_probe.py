"""specsim probe: servers that cannot be used, secrets, interruptions, and the file of JUnit."""

import asyncio
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import iscoroutinefunction
from itertools import count
from signal import SIGINT, SIGTERM
from threading import Event, Thread
from xml.etree import ElementTree

import httpx
import pytest

from specsim.core.errors import InputError
from specsim.correctness.probe import Connection, Server

KEY = "sk-secret"
URL = "http://user:word@server:1/v1/"


def answer(**changes):
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.7], "top_logprobs": [{"a": -0.5}, {"b": -0.7}]}
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": logprobs}
    return {"model": "m", "choices": [choice | changes.pop("choice", {})]} | changes


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    """Run the command with a server whose responses to completions a function gives: status, output, errors, JSON."""
    client = httpx.AsyncClient
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").write_text("ab\n")

    def command(respond, *words, only="repeat,stream,usage"):
        async def handle(request):
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            return await respond(request) if iscoroutinefunction(respond) else respond(request)

        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(httpx, "AsyncClient", lambda **named: client(**{**named, "transport": transport}))
        amounts = ("--prompts", "prompts", "--max-tokens", "8", "--samples", "16", "--only", only)
        status, out, err = call("probe", "--url", URL, *amounts, "--json", "out.json", *words)
        file = tmp_path / "out.json"
        return status, out, err, json.loads(file.read_text()) if file.exists() else None

    return command


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
def test_a_server_that_cannot_be_used_is_one_sentence(name, run):
    respond, field = BAD[name]
    status, _, err, _ = run(respond, "--timeout", "0.2" if name == "slow" else "5")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"specsim: {field} is ")


def test_secrets_are_neither_written_nor_printed(run, tmp_path):
    """A server repeats them, an argument too many holds them, and so does a file of options."""

    def repeating(request):
        return httpx.Response(400, json={"error": {"message": f"{KEY} and word are bad"}})

    words = ("--junit", "junit.xml", "--save-config", "options.toml")
    written = [run(respond, *words)[1:3] for respond in (repeating, lambda _: httpx.Response(200, json=answer()))]
    written.append(run(repeating, URL)[1:3])  # an argument too many
    (tmp_path / "other.toml").write_text(f'url = "{URL}"')
    written.append(run(repeating, "--config", "other.toml")[1:3])
    (tmp_path / "other.toml").unlink()
    written += [file.read_text() for file in tmp_path.iterdir()]
    assert {"junit.xml", "options.toml", "out.json"} <= {file.name for file in tmp_path.iterdir()}
    assert "server:1" in (tmp_path / "options.toml").read_text()
    for secret in (KEY, "user", "word", "@"):
        assert all(secret not in text for text in map(str, written))


def test_junit_counts_failures_and_what_cannot_be_shown(run, tmp_path):
    def refuses(request):
        body = json.loads(request.content)
        if body.get("n"):
            return httpx.Response(400, content=json.dumps({"error": {"message": "n \x1b \ud800 <&"}}))
        return httpx.Response(200, json=answer())

    status, *_, value = run(refuses, "--junit", "junit.xml", only="usage,repeat,choices,logprobs")
    assert (status, value["is_complete"]) == (1, True)
    suite = ElementTree.fromstring((tmp_path / "junit.xml").read_bytes())
    assert (suite.tag, suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("testsuite", "4", "1", "2")
    assert [case.get("name") for case in suite] == ["usage", "repeat", "choices", "logprobs"]
    assert [[part.tag for part in case] for case in suite] == [["failure"], [], ["skipped"], ["skipped"]]
    assert "max_tokens=1 gives 2 tokens" in suite[0][0].get("message")
    assert r"n \x1b \ud800 <&" in suite[2][0].get("message")


@pytest.mark.by_default("SIGTERM")
@pytest.mark.parametrize(
    ("number", "says"), [(SIGINT, "interrupted"), (SIGTERM, "terminated")], ids=["SIGINT", "SIGTERM"]
)
def test_an_interruption_keeps_what_was_checked(tmp_path, number, says):
    """The server stops to answer after the request that shows the first property."""
    counted, hangs, goes_on = count(1), Event(), Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # http.server's name
            if next(counted) > 2:
                hangs.set()
                goes_on.wait(300)
                return
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer()).encode())

        def log_message(self, *_):
            pass

    (tmp_path / "prompts").write_text("ab\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = f"--url http://127.0.0.1:{server.server_port} --model m --prompts prompts --only listing,repeat"
        command = [sys.executable, "-m", "specsim", "probe", *words.split(), "--json", "out.json", "--junit", "out.xml"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert hangs.wait(300)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        goes_on.set()
        server.shutdown()
    assert (process.returncode, err) == (128 + number, f"specsim: {says}; written so far: listing\n")
    value = json.loads((tmp_path / "out.json").read_text())
    assert ([result["name"] for result in value["properties"]], value["is_complete"]) == (["listing"], False)
    assert ElementTree.fromstring((tmp_path / "out.xml").read_bytes()).get("tests") == "1"


@pytest.mark.parametrize("url", ["server", "ftp://server", "http://", "http://server:port", "http://server/?key=1"])
def test_an_address_that_none_has(url):
    with pytest.raises(InputError, match="url is"):
        Server(url, Connection())
