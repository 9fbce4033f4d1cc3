"""Client of a server with OpenAI's API: completions, many at once, and one sentence for every way to fail."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from specsim.core.errors import InputError, require, shortened
from specsim.core.files import is_event_stream, parse_json_lines
from specsim.correctness.explain.answers import Answer, parse_answers

MOST_BYTES = 2**26  # of a response
_MOST_REASON = 120  # characters of a server's own words
_COMPLETIONS = "the address of a server that answers /v1/completions as OpenAI's API does"


@dataclass(frozen=True, slots=True)
class Connection:
    """Settings of the requests to a server."""

    key: str | None = field(default=None, repr=False)  # sent as a bearer token
    key_variable: str = "OPENAI_API_KEY"  # environment variable that the key comes from
    model: str | None = None  # None: the first that the server lists
    timeout: float = 60.0  # seconds for a whole response
    concurrency: int = 32  # most requests at once


class Refused(Exception):
    """A request that the server does not take, or that it fails at, in its own words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"status {status}: {reason}" if status else reason)
        self.is_failure = status >= 500


class Reply(NamedTuple):
    """The response to one request."""

    answers: tuple[Answer, ...]  # by index
    finish_reasons: tuple[str | None, ...]
    usage: Mapping[str, Any]  # empty where the response has none

    @property
    def answer(self) -> Answer:
        """The first answer."""
        return self.answers[0]


class Server:
    """A running server; a context manager, which closes its connections.

    url: of the server, with or without /v1. name: of the option that gives it. transport: of httpx, in place of the
    network. InputError for an address that none has, without httpx, and whenever the server cannot be used.
    """

    def __init__(self, url: str, connection: Connection, name: str = "url", transport: Any = None) -> None:
        self.connection = connection
        self.name = name
        self.address = self._public(url)
        self.model = connection.model
        self._answering_model: str | None = None
        base = url.rstrip("/")
        password = urlsplit(url).password
        key = connection.key if "@" not in urlsplit(url).netloc else None
        self._secrets = [secret for secret in (connection.key, password, password and unquote(password)) if secret]
        self._client = _httpx().AsyncClient(
            base_url=base.removesuffix("/v1") + "/v1",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=connection.timeout,
            transport=transport,
        )
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_exception_handler(lambda *_: None)  # of tasks that a signal ends: it is raised too

    def __enter__(self) -> Self:
        if self.model is None:
            listed = self._runner.run(self._fetch("GET", "/models", None))
            try:
                self.model = str(json.loads(listed)["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                allowed = "the address of a server that lists its models under /v1/models; or give --model"
                raise InputError(self.name, self.address, allowed) from error
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Send requests at the same time, and return their responses in order.

        Refused for one that the server does not take.
        """
        return self._runner.run(self._ask_all(bodies))

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
        slots = asyncio.Semaphore(self.connection.concurrency)

        async def ask_one(body: Mapping[str, Any]) -> Reply:
            async with slots:
                return self._reply(await self._fetch("POST", "/completions", {"model": self.model, **body}))

        tasks = [asyncio.ensure_future(ask_one(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None) -> str:
        """Send one request; its whole response must come in time."""
        httpx = _httpx()
        data = bytearray()
        try:
            async with (
                asyncio.timeout(self.connection.timeout),
                self._client.stream(method, path, json=body) as response,
            ):
                async for chunk in response.aiter_bytes():
                    data += chunk
                    allowed = f"{_COMPLETIONS}, in at most {MOST_BYTES:,} bytes"
                    require(len(data) <= MOST_BYTES, self.name, self.address, allowed)
        except (TimeoutError, httpx.TimeoutException) as error:
            allowed = f"more seconds, or a faster server: {self.address} gave no whole answer in that time"
            raise InputError("timeout", self.connection.timeout, allowed) from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            reason = type(error).__name__
            raise InputError(self.name, self.address, f"the address of a running server ({reason})") from error
        text = data.decode(errors="replace")
        self._check_status(response.status_code, text)
        return text

    def _check_status(self, status: int, text: str) -> None:
        if status == 200:
            return
        if status in (401, 403):
            allowed = (
                f"an environment variable with a key that {self.address} accepts (it answered with status {status})"
            )
            raise InputError("api_key_variable", self.connection.key_variable, allowed)
        reason = self._reason(text)
        if status in (400, 404, 405, 413, 415, 422, 500, 501) and "error" in text.lower():
            raise Refused(status, reason)
        raise InputError(self.name, self.address, f"{_COMPLETIONS} (it answered with status {status})")

    def _reason(self, text: str) -> str:
        """Give a server's own words without key and password, which it may repeat."""
        try:
            value = json.loads(text)
            error = value.get("error", value)
            text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
        except (ValueError, AttributeError, RecursionError):
            pass
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return shortened(" ".join(text.split()), _MOST_REASON)

    def _reply(self, text: str) -> Reply:
        """Read one JSON value, or the events of a stream."""
        values = parse_json_lines(text, self.name, self.address, _COMPLETIONS)
        is_sound = values and all(isinstance(value, dict) for value in values)
        require(is_sound, self.name, self.address, f"{_COMPLETIONS} (no JSON object)")
        answers = parse_answers(values if is_event_stream(text) else values[0], self.name, self.address)
        usage: Mapping[str, Any] = {}
        reasons: dict[int, str | None] = {}
        for value in values:
            self._check_model(value.get("model"))
            usage = value.get("usage") or usage
            for choice in value.get("choices") or ():
                index = choice.get("index") or 0
                reasons[index] = choice.get("finish_reason") or reasons.get(index)
        return Reply(answers, tuple(reasons[index] for index in sorted(reasons)), usage)

    def _check_model(self, model: Any) -> None:
        self._answering_model = self._answering_model or model
        if model not in (None, self._answering_model):
            allowed = f"a server of one model; it answered as {self._answering_model!r} and then as {model!r}"
            raise InputError(self.name, self.address, allowed)

    def _public(self, url: str) -> str:
        """Give the address without user, password and query, which may be secrets."""
        try:
            parts = urlsplit(url)
            host = parts.hostname
            port = f":{parts.port}" if parts.port else ""
        except ValueError as error:
            raise InputError(self.name, "no address", "an address such as http://127.0.0.1:8000") from error
        is_sound = parts.scheme in ("http", "https") and host and not parts.query
        require(is_sound, self.name, f"{parts.scheme}://{host}", "an address such as http://127.0.0.1:8000")
        host = f"[{host}]" if ":" in str(host) else host
        return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        allowed = f"nothing without httpx; install it: pip install 'specsim[probe]' ({error})"
        raise InputError("url", "a server", allowed) from error
    return httpx
