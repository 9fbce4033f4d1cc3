"""specsim probe: check a running server, with speculation and without."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specsim.cli.option_fields import command_line, common
from specsim.cli.options import JsonOptions, report
from specsim.core.errors import require
from specsim.core.files import read_text, write_whole
from specsim.core.limits import Seed

if TYPE_CHECKING:
    from specsim.correctness.probe import ProbeReport

_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(JsonOptions):
    """Options of specsim probe."""

    # Address of a server with OpenAI's API.
    url: Annotated[str, common("Server", values="URL")]
    # Server of the same model without speculation.
    url_plain: Annotated[str | None, common("Server", values="URL", default="--url, if requests can turn it off")] = (
        None
    )
    # Name of the model in requests.
    model: Annotated[str | None, common("Server", default="the first that the server lists")] = None
    # Environment variable with the key of the API.
    api_key_variable: Annotated[str, common("Server", values="NAME")] = _KEY
    # Seconds for a whole response.
    timeout: Annotated[float, common("Server", above=0.0)] = 60.0
    # Most requests at once.
    concurrency: Annotated[int, common("Server", at_least=2, at_most=1024)] = 32
    # Properties to check.
    only: Annotated[str | None, common("Checks", values="A,B,...", default="all")] = None
    # Data type of the server, for the rounding error of a logit.
    dtype: Annotated[Literal["float32", "float64", "bfloat16", "float16"], common("Checks")] = "bfloat16"
    # Text file with a prompt on each line.
    prompts: Annotated[Path | None, common("Checks", default="four short ones", file="reads")] = None
    # Most new tokens of a greedy answer.
    max_tokens: Annotated[int, common("Checks", at_least=8)] = 32
    # Sampled answers of each setting of a distribution.
    samples: Annotated[int, common("Checks", at_least=16)] = 512
    # Seed of the first sampled answer.
    seed: Annotated[Seed, common("Checks")] = 0
    # Also write the results to this XML file in JUnit's form.
    junit: Annotated[Path | None, common("Output", file="writes")] = None


def probe(options: ProbeOptions) -> None:
    """Check the answers of a running server with speculation.

    Each property holds, fails, or cannot be shown by this server. A key of the API is read from the environment.

    Exit status: 0 if all properties that can be shown hold, 1 if one fails, 2 for bad input, for a server that cannot
    be used, and if nothing could be checked. Results so far are written in each case.

    Examples:
      specsim probe --url http://127.0.0.1:8000
      specsim probe --url http://127.0.0.1:8000 --url-plain http://127.0.0.1:8001
    """
    from contextlib import ExitStack

    from specsim.core.provenance import now
    from specsim.correctness.explain import Noise
    from specsim.correctness.probe import Connection, ProbeReport, ProbeSettings, Server
    from specsim.correctness.probe import probe as run

    connection = Connection(
        _key(options), options.api_key_variable, options.model, options.timeout, options.concurrency
    )
    server = Server(options.url, connection)
    plain = None if options.url_plain is None else Server(options.url_plain, connection, "url_plain")
    amounts: dict[str, Any] = {"max_tokens": options.max_tokens, "samples": options.samples, "seed": options.seed}
    if options.prompts is not None:
        amounts["prompts"] = _prompts(options.prompts)
    settings = ProbeSettings(Noise.of(options.dtype), **amounts)
    result = ProbeReport(server.address, plain and plain.address)
    value = {"command": command_line("probe", options), "date": now()}
    only = None if options.only is None else options.only.split(",")
    try:
        with ExitStack() as servers:
            for opened in filter(None, (server, plain)):
                servers.enter_context(opened)
            run(result, server, plain, settings, only, _show_progress)
    except KeyboardInterrupt as end:
        names = ", ".join(checked.name for checked in result.properties)
        end.args = (f"written so far: {names}" if names else "no property was checked",)
        raise
    finally:
        _write(options, result, value)


def _write(options: ProbeOptions, result: "ProbeReport", value: dict[str, str]) -> None:
    """Write the results so far; only those of a whole run decide the exit status."""
    if not result.properties:
        return
    try:
        is_ok = result.is_ok or not result.is_complete
        report("probe", result.show, {**value, **result.to_json()}, options.json, is_ok)
    finally:
        if options.junit is not None:
            write_whole(options.junit, result.junit(), "junit")


def _key(options: ProbeOptions) -> str | None:
    """Read the key from the environment."""
    name = options.api_key_variable
    key = os.environ.get(name)
    require(key is not None or name == _KEY, "api_key_variable", name, "an environment variable that is set")
    is_sound = key is None or (key.isascii() and key.isprintable())
    require(is_sound, "api_key_variable", name, "an environment variable with a key of ASCII characters")
    return key or None


def _prompts(file: Path) -> tuple[str, ...]:
    lines = tuple(line for line in read_text(file, "prompts", "a text file").splitlines() if line.strip())
    require(lines, "prompts", str(file), "a text file with a prompt on each line")
    return lines


def _show_progress(name: str) -> None:
    """Overwrite a progress line, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)
