"""specsim serve: answer requests over HTTP."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specsim.cli.option_fields import common, option
from specsim.cli.options import ImplementationOptions, PairOptions, pick, told_as
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, tell
from specsim.core.limits import BatchSize

if TYPE_CHECKING:
    from specsim.serving.http.service import Service

_SERVING = ServingConfig()


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PairOptions, ImplementationOptions):
    """Options of specsim serve."""

    # Address to listen at; others than this machine's own open the server to the network.
    host: Annotated[str, common("Server")] = "127.0.0.1"
    # Port to listen at; 0: a free one.
    port: Annotated[int, common("Server", at_least=0, at_most=65535)] = 8000
    # Largest number of running requests.
    max_running: Annotated[BatchSize, common("Server")] = _SERVING.max_running
    # Requests that may wait; further ones get status 429.
    max_queue: Annotated[int, option("Server", at_least=0)] = 256
    # Connections that are open at once; further ones get status 503.
    max_connections: Annotated[int, option("Server", at_least=1)] = 1024
    # Largest body of a request, in bytes.
    max_body: Annotated[int, option("Server", at_least=1)] = 4194304
    # Seconds that a request may wait before it ends with status 503.
    queue_timeout: Annotated[float, option("Server", above=0, default="no limit")] = math.inf
    # Seconds that a request may take before it ends with status 503.
    request_timeout: Annotated[float, option("Server", above=0, default="no limit")] = math.inf
    # Largest number of prompt tokens in a step.
    chunk_tokens: Annotated[int, option("Server", at_least=1)] = 2048
    # The host reads a step's results before it plans the next step (sync), or one step later (overlap).
    schedule: Annotated[Literal["sync", "overlap"], option("Server")] = _SERVING.schedule
    # Request that is preempted when the pool is full.
    preemption: Annotated[Literal["latest", "shortest", "longest"], option("Server")] = _SERVING.preemption
    # Size of the KV pool in tokens.
    slots: Annotated[int, common("KV cache", limits="at least --page-size")] = 16384
    # Reuse the KV of equal prefixes.
    prefix_cache: Annotated[bool, common("KV cache", is_negatable=True)] = True


def serve(options: ServeOptions) -> None:
    """Answer requests over HTTP, for teaching, probing and tests.

    Speaks the forms of OpenAI (/v1/completions, /v1/chat/completions) and of SGLang (/generate). It is no production
    server.

    Exit status: 0 never, as a signal ends it: 130 after Ctrl-C, 143 after SIGTERM, 2 for
    bad input.

    Examples:
      specsim serve
      specsim serve --port 9000 --num-steps 5
      specsim serve --drafter none
    """
    try:
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401

        from specsim.serving.http.limits import ServerLimits
        from specsim.serving.http.server_engine import load_server_engine
        from specsim.serving.http.service import Service
    except ModuleNotFoundError as error:
        allowed = f"a Python environment with {error.name}: pip install 'specsim[serve]'"
        raise InputError("serve", "not installed", allowed) from error
    from specsim.serving.scheduler import check_serving

    config = options.config()
    with told_as(num_slots="slots"):
        serving = pick(ServingConfig, options, num_slots=options.slots)
        acceptance = options.acceptance()
        drafts_on_host = options.drafts_on_host(config)
        engine_options = options.engine_options(config, acceptance is None, drafts_on_host)
        check_serving(serving, config)
        pair = options.load(config, engine_options)
        engine = load_server_engine(pair, config, engine_options, acceptance)
    limits = ServerLimits(
        queue=options.max_queue,
        body=options.max_body,
        queue_seconds=options.queue_timeout,
        request_seconds=options.request_timeout,
    )
    with Service(pair, engine, serving, limits) as service:
        _listen(options, service)


def _listen(options: ServeOptions, service: "Service") -> None:
    """Answer until a signal comes, which is raised again once all requests have ended."""
    import socket

    import uvicorn

    from specsim.serving.http.app import create_app

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            service.abort()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(service),
        host=options.host,
        port=options.port,
        log_level="warning",
        limit_concurrency=options.max_connections,
        timeout_graceful_shutdown=5,
    )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "no such host"
            allowed = f"an address where this process can listen ({reason})"
            raise InputError("host", f"{options.host}:{options.port}", allowed) from error
        listener.listen()  # connections wait from now on
        host, port = listener.getsockname()[:2]
        tell("this server is for teaching, probing and tests; it is no production server")
        print(f"{service.pair.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        Server(config).run(sockets=[listener])
