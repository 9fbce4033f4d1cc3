"""The server's routes, its errors, and the ends of its connections."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from specsim.core.errors import InputError, printable, require_type
from specsim.serving.http import native, openai
from specsim.serving.http.forms import flag, read_body
from specsim.serving.http.limits import Unavailable
from specsim.serving.http.service import Service
from specsim.serving.http.sessions import Sessions
from specsim.serving.http.ticket import Ticket
from specsim.serving.scheduler import Scheduler

T = TypeVar("T")
_TYPES = {400: "BadRequestError", 404: "NotFoundError", 413: "RequestTooLargeError", 429: "RateLimitError"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service) -> Starlette:
    """Make the application of a running service."""
    routes = _Routes(service)
    paths: dict[str, tuple[Callable[[HTTPRequest], Awaitable[Response]], list[str]]] = {
        "/v1/completions": (routes.completions, ["POST"]),
        "/v1/chat/completions": (routes.chat, ["POST"]),
        "/v1/models": (routes.models, ["GET"]),
        "/generate": (routes.generate, ["POST"]),
        "/open_session": (routes.open_session, ["POST"]),
        "/close_session": (routes.close_session, ["POST"]),
        "/abort_request": (routes.abort_request, ["POST"]),
        "/flush_cache": (routes.flush_cache, ["GET", "POST"]),
        "/pause_generation": (routes.pause, ["POST"]),
        "/continue_generation": (routes.resume, ["POST"]),
        "/health": (routes.health, ["GET"]),
        "/health_generate": (routes.health_generate, ["GET"]),
        "/get_server_info": (routes.server_info, ["GET"]),
        "/server_info": (routes.server_info, ["GET"]),
        "/get_model_info": (routes.model_info, ["GET"]),
        "/model_info": (routes.model_info, ["GET"]),
        "/metrics": (routes.metrics, ["GET"]),
    }
    handlers: Any = {InputError: _bad_input, Unavailable: _unavailable, HTTPException: _refused, Exception: _failed}
    handlers[ClientDisconnect] = _gone
    app = Starlette(
        routes=[Route(path, endpoint, methods=methods) for path, (endpoint, methods) in paths.items()],
        exception_handlers=handlers,
    )
    app.state.service = service
    return app


def _error(request: HTTPRequest, status: int, sentence: str, param: str | None = None) -> JSONResponse:
    """Make the answer of an error: OpenAI's form below /v1, else SGLang's."""
    kind = _TYPES.get(status, "InternalServerError")
    body = {"object": "error", "message": printable(sentence), "type": kind, "param": param, "code": status}
    is_openai = request.url.path.startswith("/v1/")
    return JSONResponse({"error": body} if is_openai else {**body, "error": {"message": body["message"]}}, status)


async def _bad_input(request: HTTPRequest, error: Any) -> Response:
    return _error(request, 400, str(error), error.name)


async def _unavailable(request: HTTPRequest, error: Any) -> Response:
    return _error(request, error.status, str(error))


async def _refused(request: HTTPRequest, error: Any) -> Response:
    return _error(request, error.status_code, f"{request.method} {request.url.path}: {error.detail}")


async def _failed(request: HTTPRequest, error: Exception) -> Response:
    return _error(request, 500, f"the server failed: {type(error).__name__}")


async def _gone(request: HTTPRequest, error: Exception) -> Response:
    return Response(status_code=499)  # read by nobody


async def _while_connected(request: HTTPRequest, work: Awaitable[T]) -> T:
    """Wait for a result; where the client goes, cancel the work and raise ClientDisconnect."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(leave())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, leaving):
            future.cancel()


async def _events(chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Write the events of a stream; an error after its start is the last one."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except (InputError, Unavailable) as error:
        yield _event({"error": {"message": str(error), "code": getattr(error, "status", 400)}})
    yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _from(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in rest:
        yield item


class _Routes:
    """Endpoints of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sessions = Sessions()

    async def _body(self, request: HTTPRequest) -> dict[str, Any]:
        most = self._service.limits.body
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > most:
                raise Unavailable(413, f"the body is longer than {most} bytes, the limit of this server")
        return read_body(bytes(parts))

    async def _answer(self, request: HTTPRequest, form: Any, call: Any, ticket: Ticket) -> Response:
        """Answer a call at once, or as a stream once it has begun without an error."""
        if not call.streams:
            results = await _while_connected(request, ticket.results())
            return JSONResponse(form.answer(self._service, call, results))
        updates = ticket.updates()
        first = await _while_connected(request, anext(updates))
        chunks = form.chunks(self._service, call, _from(first, updates))
        return StreamingResponse(_events(chunks), media_type="text/event-stream")

    async def completions(self, request: HTTPRequest) -> Response:
        call = await run_in_threadpool(openai.read_completion, self._service, await self._body(request))
        return await self._answer(request, openai, call, self._service.submit(call.asks))

    async def chat(self, request: HTTPRequest) -> Response:
        call = await run_in_threadpool(openai.read_chat, self._service, await self._body(request))
        return await self._answer(request, openai, call, self._service.submit(call.asks))

    async def models(self, _: HTTPRequest) -> Response:
        return JSONResponse(openai.models(self._service))

    async def generate(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        call = await run_in_threadpool(
            native.read_generate, self._service, body
        )  # others go on while it makes a grammar
        turn = self._sessions.turn(body)
        call = call if turn is None else call.in_session(turn)
        return await self._answer(request, native, call, self._service.submit(call.asks))

    async def open_session(self, request: HTTPRequest) -> Response:
        return JSONResponse(self._sessions.open(await self._body(request)))

    async def close_session(self, request: HTTPRequest) -> Response:
        self._service.close_session(self._sessions.close(await self._body(request)))
        return Response()

    async def abort_request(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        rid = body.get("rid") or ""
        require_type("rid", rid, str, "a text")
        if flag(body, "abort_all"):
            self._service.abort()
        else:
            self._service.abort_named(rid)
        return Response()

    async def flush_cache(self, _: HTTPRequest) -> Response:
        def flush(scheduler: Scheduler) -> bool:
            is_idle = not scheduler.is_busy
            if is_idle:
                scheduler.reservations.close()
            return is_idle

        if not await self._service.run(flush):
            raise Unavailable(400, "the cache is not flushed, as requests are running")
        return PlainTextResponse("Cache flushed.\n")

    async def pause(self, _: HTTPRequest) -> Response:
        self._service.pause(True)
        return JSONResponse({"status": "ok"})

    async def resume(self, _: HTTPRequest) -> Response:
        self._service.pause(False)
        return JSONResponse({"status": "ok"})

    async def health(self, _: HTTPRequest) -> Response:
        if not self._service.is_running:
            raise Unavailable(503, "the engine thread has ended")
        return Response()

    async def health_generate(self, request: HTTPRequest) -> Response:
        call = native.read_generate(self._service, {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
        await self._service.submit(call.asks).results()
        return Response()

    async def server_info(self, _: HTTPRequest) -> Response:
        return JSONResponse(native.server_info(self._service))

    async def model_info(self, _: HTTPRequest) -> Response:
        return JSONResponse(native.model_info(self._service))

    async def metrics(self, _: HTTPRequest) -> Response:
        def page(scheduler: Scheduler) -> bytes:
            num_running = len(scheduler.runner.requests)
            num_waiting = self._service.num_open - num_running
            return self._service.metrics.page(num_running, num_waiting, scheduler.reservations.usage())

        return Response(await self._service.run(page), media_type=_METRICS_TYPE)
