"""Results of benchmarks as measured cells: the formats of vLLM's and SGLang's tools, and CSV.

Formats are those of vllm 0.11 (`vllm bench serve`, `bench throughput`, `bench latency`) and sglang 0.5
(bench_serving, bench_one_batch_server).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.files import parse_json_lines, read_text
from specsim.core.limits import (
    MOST_RUNNING,
    MOST_STEPS,
    MOST_TOKENS,
    MOST_WIDTH,
    read_integer,
    read_number,
    read_positive,
)
from specsim.simulator.calibration.benchmark_csv import named, read_csv
from specsim.simulator.calibration.context import Context
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.measurement import Report, read_results

_ALLOWED = "a result of vLLM's or SGLang's benchmarks in JSON, or a table in CSV"
_ARGUMENTS = {  # of SGLang's server, and the most of each
    "speculative_num_steps": MOST_STEPS,
    "speculative_eagle_topk": MOST_WIDTH,
    "speculative_num_draft_tokens": MOST_WIDTH,
}
_PLAIN = 1.0 + 1e-9  # accept lengths up to it are those of decoding without drafts


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read."""

    path: str
    tool: str
    sha256: str
    cells: int


def read(path: Path, context: Context) -> tuple[Source, list[Observation]]:
    """Read the measured cells of a file; InputError for what it lacks and the context does not give."""
    text = read_text(path, "file", _ALLOWED)
    place = str(path)
    if text.lstrip()[:1] not in ("{", "["):
        tool = "CSV"
        found = read_csv(text, place, context)
    else:
        values = _flat(parse_json_lines(text, "file", place, _ALLOWED))
        require(values and all(isinstance(value, Mapping) for value in values), "file", place, _ALLOWED)
        tool = _tool(values[0], place)
        if tool in _READERS:
            found = [_READERS[tool](value, f"{place}, run {run}", context) for run, value in enumerate(values, 1)]
        else:
            reports = read_results(path)
            found = [_served(*pair, place, context) for pair in zip(reports, values, strict=True)]
    digest = sha256(path.read_bytes()).hexdigest()
    return Source(path.name, tool, digest, len(found)), found


def _flat(values: Sequence[Any]) -> list[Any]:
    return list(values[0]) if len(values) == 1 and isinstance(values[0], list) else list(values)


def _tool(value: Mapping[str, Any], place: str) -> str:
    """Name the tool that wrote a result, by the fields that only it writes."""
    if "batch_size" in value and "output_len" in value and "latency" in value:
        return "sglang bench_one_batch_server"
    if "avg_latency" in value:
        return "vllm bench latency"
    if "requests_per_second" in value and "elapsed_time" in value:
        return "vllm bench throughput"
    if "mean_e2e_latency_ms" in value:
        return "sglang bench_serving"
    if "request_throughput" in value and "output_throughput" in value:
        return "vllm bench serve"
    raise InputError("file", place, _ALLOWED)


def _served(report: Report, value: Mapping[str, Any], place: str, context: Context) -> Observation:
    """Make the cell of a run of requests, of either engine."""
    completed = report.completed or 0
    require(completed, "completed", completed, f"at least one request (in {place})")
    length = report.figures.get("Spec Decode Accept Length") or 1.0
    config = _setting(report, value, length, context, place)
    size = report.concurrency or context.batch or round(report.mean_in_flight or 0)
    if not size:
        allowed = f"a number, since {place} has no max_concurrency: cells need a number of requests in flight"
        raise InputError("batch", "not given", allowed)
    figures = {
        "tokens_per_s": report.figures["Output Throughput (tok/s)"],
        "tpot_s": report.figures.get("Mean TPOT (ms)", 0) * 1e-3,
        "ttft_s": report.figures.get("Mean TTFT (ms)", 0) * 1e-3,
    }
    return Observation(
        f"{named(config)}, clients {size}",
        config,
        min(size, completed),
        1.0 if config.is_plain else min(length, config.num_steps + 1.0),
        max(1, round((report.input_tokens or 0) / completed)),
        max(1, round((report.output_tokens or 0) / completed)),
        {name: each for name, each in figures.items() if each},
    )


def _setting(report: Report, value: Mapping[str, Any], length: float, context: Context, place: str) -> Any:
    """Find the setting: counters of vLLM, the server's arguments in SGLang's file, or the context."""
    if report.num_rounds and report.num_drafts:
        return context.with_setting(round(report.num_drafts / report.num_rounds)).config(place)
    info = value.get("server_info")
    info = info if isinstance(info, Mapping) else {}
    steps, topk, nodes = (_optional(info, name, place, most) for name, most in _ARGUMENTS.items())
    if steps:
        return context.with_setting(steps, topk, nodes).config(place)
    if length <= _PLAIN:
        return context.with_setting(0).config(place)
    return context.config(place)


def _optional(value: Mapping[str, Any], name: str, place: str, most: int) -> int | None:
    return None if value.get(name) is None else read_integer(value[name], name, place, 0, most)


def _optional_number(value: Mapping[str, Any], name: str, place: str) -> float:
    """Read a figure for which some versions write -1, or nothing, where there is none."""
    return -1.0 if value.get(name) is None else read_number(value[name], name, place, -1.0)


def _one_batch(value: Mapping[str, Any], place: str, context: Context) -> Observation:
    """Make the cell of a batch that starts together; with a last_ttft its throughput is that of decoding."""
    size = read_integer(value["batch_size"], "batch_size", place, 1, MOST_RUNNING)
    prompt, output = (
        read_integer(value.get(name), name, place, 1, MOST_TOKENS) for name in ("input_len", "output_len")
    )
    length = _optional_number(value, "acc_length", place)
    is_plain = length <= _PLAIN
    config = (context.with_setting(0) if is_plain else context).config(place)
    latency = read_positive(value["latency"], "latency", place)
    ttft = _optional_number(value, "last_ttft", place)
    if 0 < ttft < latency:
        figures = {"decode_tokens_per_s": size * (output - 1) / (latency - ttft)}
    else:
        figures = {"tokens_per_s": size * output / latency}
    own = 1.0 if is_plain else min(length, config.num_steps + 1.0)
    return Observation(f"{named(config)}, batch {size}", config, size, own, prompt, output, figures)


def _latency(value: Mapping[str, Any], place: str, context: Context) -> Observation:
    """Make the cell of `vllm bench latency`, whose file has neither batch nor lengths nor acceptance."""
    size, prompt, output = (context.number(name, place) for name in ("batch", "prompt_tokens", "output_tokens"))
    return _whole(
        context,
        place,
        size,
        (prompt, output),
        size * output / read_positive(value["avg_latency"], "avg_latency", place),
    )


def _throughput(value: Mapping[str, Any], place: str, context: Context) -> Observation:
    """Make the cell of `vllm bench throughput`, whose file has the sum of prompt and output tokens only."""
    size, prompt, output = (context.number(name, place) for name in ("batch", "prompt_tokens", "output_tokens"))
    speed = read_positive(value["requests_per_second"], "requests_per_second", place) * output
    requests = read_integer(value.get("num_requests"), "num_requests", place, 1)
    return _whole(context, place, min(size, requests), (prompt, output), speed)


def _whole(context: Context, place: str, size: int, lengths: tuple[int, int], speed: float) -> Observation:
    config = context.config(place)
    length = 1.0 if config.is_plain else None
    return Observation(f"{named(config)}, batch {size}", config, size, length, *lengths, {"tokens_per_s": speed})


_READERS = {
    "sglang bench_one_batch_server": _one_batch,
    "vllm bench latency": _latency,
    "vllm bench throughput": _throughput,
}
