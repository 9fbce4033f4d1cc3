"""Results of benchmarks as measured cells: the formats of client_results, of one batch in JSON, and CSV.

Formats of one batch are those of vllm 0.11 (`bench throughput`, `bench latency`) and sglang 0.5
(bench_one_batch_server).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_int
from specsim.core.files import read_text
from specsim.core.limits import (
    MOST_RUNNING,
    MOST_STEPS,
    MOST_TOKENS,
    MOST_WIDTH,
    read_integer,
    read_number,
    read_positive,
)
from specsim.core.table import TableRow, read_table
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.client_results import ClientResult, client_results, is_client_result
from specsim.simulator.measurement import Report, report_of_run


@dataclass(frozen=True, slots=True)
class Context:
    """Settings and loads of runs, for files that lack them; None: not given."""

    num_steps: int | None = None
    topk: int = 1
    num_draft_tokens: int | None = None
    batch: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def config(self, location: str) -> SpecConfig:
        """Make the setting of speculation; InputError names the file that needs it."""
        if self.num_steps is None:
            raise InputError(
                "num_steps", "not given", f"a number, since {location} does not contain it; 0 without drafts"
            )
        require_int("num_steps", self.num_steps, 0)
        if not self.num_steps:
            return SpecConfig.plain()
        nodes = self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens
        return SpecConfig(self.topk, self.num_steps, nodes)

    def number(self, name: str, location: str) -> int:
        """Give one of the loads; InputError names the file that needs it."""
        value = getattr(self, name)
        if value is None:
            raise InputError(name, "not given", f"a number, since {location} does not contain it")
        return value

    def with_setting(self, num_steps: int | None, topk: int | None = None, nodes: int | None = None) -> "Context":
        """Replace the setting by one that a file contains."""
        if num_steps is None:
            return self
        return replace(self, num_steps=num_steps, topk=topk or 1, num_draft_tokens=nodes)


LOADS = ("batch", "concurrency")
SPEEDS = ("tokens_per_s", "tpot_ms")
COLUMNS = {
    "batch": "requests of an engine's batch; speeds are of decoding alone",
    "concurrency": "clients, each with one request at a time; speeds include prompts",
    "num_steps": "draft steps, 0 or plain for decoding without drafts",
    "topk": "drafts kept at each step, 1 unless given",
    "num_draft_tokens": "nodes that the target verifies, num_steps + 1 unless given",
    "accept_length": "mean tokens of a round, bonus included",
    "tokens_per_s": "output tokens a second of all requests",
    "tpot_ms": "milliseconds per output token of a request",
    "ttft_ms": "milliseconds to the first token, with concurrency",
    "prompt_tokens": "mean tokens of a prompt",
    "output_tokens": "mean tokens of an output",
}
_ALIASES = {
    "batch_size": "batch",
    "bs": "batch",
    "clients": "concurrency",
    "steps": "num_steps",
    "setting": "num_steps",
    "num_draft": "num_draft_tokens",
    "acc_length": "accept_length",
    "throughput": "tokens_per_s",
    "output_throughput": "tokens_per_s",
    "tok/s": "tokens_per_s",
    "tpot": "tpot_ms",
}
_INTEGERS = {  # columns of integers with their least and most
    "batch": (1, MOST_RUNNING),
    "concurrency": (1, MOST_RUNNING),
    "num_steps": (0, MOST_STEPS),
    "topk": (1, MOST_WIDTH),
    "num_draft_tokens": (1, MOST_WIDTH),
    "prompt_tokens": (1, MOST_TOKENS),
    "output_tokens": (1, MOST_TOKENS),
}
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")  # thousands with commas between them


def read_csv(text: str, location: str, context: Context) -> list[Observation]:
    """Read the rows of a table; InputError names `location` and the row."""
    table = read_table(text, "file", location, lambda name: _ALIASES.get(name.strip().lower(), name.strip().lower()))
    allowed = f"a CSV file with columns of {', '.join(COLUMNS)}"
    for names, missing in ((LOADS, "batch or concurrency is"), (SPEEDS, "tokens_per_s and tpot_ms are")):
        require(any(name in table.columns for name in names), "file", location, f"{allowed} ({missing} missing)")
    cells = [_row(row, context) for row in table.rows]
    require(cells, "file", location, "at least one row of figures")
    return cells


def _row(row: TableRow, context: Context) -> Observation:
    location = row.location
    used = {name: text for name, text in row.fields.items() if name in COLUMNS and text.strip()}
    row = TableRow(location, {name: _decimal(name, text) for name, text in used.items()})
    integers = {name: row.integer(name, *limits) for name, limits in _INTEGERS.items() if name in row.fields}
    number = {name: row.number(name) for name in row.fields if name not in _INTEGERS}
    steps = integers.get("num_steps")
    setting = context.with_setting(steps, integers.get("topk"), integers.get("num_draft_tokens")).config(location)
    is_batch = "batch" in integers
    size = integers.get("batch", integers.get("concurrency"))
    if size is None:
        raise InputError("batch", "empty", f"a number, or a number of concurrency (in {location})")
    length = 1.0 if setting.is_plain else number.get("accept_length")
    return Observation(
        f"{named(setting)}, {'batch' if is_batch else 'clients'} {size}",
        setting,
        size,
        length,
        integers.get("prompt_tokens") or context.number("prompt_tokens", location),
        integers.get("output_tokens") or context.number("output_tokens", location),
        _figures(number, size, is_batch, location),
    )


def _figures(number: Mapping[str, float], size: int, is_batch: bool, location: str) -> dict[str, float]:
    speed = number.get("tokens_per_s")
    tpot = number.get("tpot_ms")
    if speed is None and tpot is None:
        raise InputError("tokens_per_s", "empty", f"a number, or a number of tpot_ms (in {location})")
    if is_batch:
        return {"decode_tokens_per_s": speed if speed is not None else size * 1e3 / (tpot or 1.0)}
    figures = {"tokens_per_s": speed, "tpot_s": tpot and tpot * 1e-3, "ttft_s": number.get("ttft_ms", 0) * 1e-3}
    return {name: value for name, value in figures.items() if value}


def named(setting: SpecConfig) -> str:
    """Name a setting in a few words."""
    if setting.is_plain:
        return "plain"
    tree = f", topk {setting.topk}, {setting.num_draft_tokens} nodes" if setting.topk > 1 else ""
    return f"{setting.num_steps} steps{tree}"


def _decimal(name: str, text: str) -> str:
    """Write a field as a number: 0 steps without drafts, no thousands' commas, no sign of a factor.

    A comma counts as one of thousands where figures are that large; in milliseconds it may be a decimal comma.
    """
    text = text.strip().rstrip("x×")
    if name == "num_steps" and text.lower() in ("plain", "none", "off"):
        return "0"
    is_large = name == "tokens_per_s" or name in _INTEGERS
    return text.replace(",", "") if is_large and _GROUPED.fullmatch(text) else text


_ALLOWED = "a result of a benchmark by vLLM, SGLang, GuideLLM, AIPerf or TensorRT-LLM, or a table in CSV"
_ARGUMENTS = {  # of SGLang's server, and the most of each
    "speculative_num_steps": MOST_STEPS,
    "speculative_eagle_topk": MOST_WIDTH,
    "speculative_num_draft_tokens": MOST_WIDTH,
}
_PLAIN = 1.0 + 1e-9  # accept lengths up to it are those of decoding without drafts


@dataclass(frozen=True, slots=True)
class BenchmarkSource:
    """A file that was read."""

    path: str  # name of the file
    tool: str  # tool that wrote it
    sha256: str  # SHA-256 of its content
    cells: int  # cells read from it
    model: str = ""  # model that it names; empty if none


def read(path: Path, context: Context) -> tuple[BenchmarkSource, list[Observation]]:
    """Read the measured cells of a file; InputError for what it lacks and the context does not give."""
    text = read_text(path, "file", _ALLOWED)
    location = str(path)
    if not is_client_result(text):
        tool = "CSV"
        model = ""
        cells = read_csv(text, location, context)
    else:
        results = client_results(text, location)
        require(results, "file", location, _ALLOWED)
        tool = _tool(results[0], location)
        read_run = _READERS.get(tool, _served)
        cells = [read_run(result, f"{location}, run {run}", context) for run, result in enumerate(results, 1)]
        model = next(filter(None, (_model(result.fields) for result in results)), "")
    digest = sha256(path.read_bytes()).hexdigest()
    return BenchmarkSource(path.name, tool, digest, len(cells), model), cells


def _servers(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List SGLang's server information: of the one server, or of those that decode."""
    server = value.get("server_info")
    decode = server.get("decode") if isinstance(server, Mapping) else None
    servers = [server, *(decode if isinstance(decode, list) else [])]
    return [entry for entry in servers if isinstance(entry, Mapping)]


def _model(value: Mapping[str, Any]) -> str:
    """Look up the model that a result names: model_id, or the path in SGLang's server information."""
    paths = [entry.get("model_path") for entry in _servers(value)]
    return next((name for name in (value.get("model_id"), *paths) if name and isinstance(name, str)), "")


def _tool(result: ClientResult, location: str) -> str:
    """Name the tool that wrote a result, by the fields that only it writes."""
    value = result.fields
    if "batch_size" in value and "output_len" in value and "latency" in value:
        return "sglang bench_one_batch_server"
    if "avg_latency" in value:
        return "vllm bench latency"
    if "requests_per_second" in value and "elapsed_time" in value:
        return "vllm bench throughput"
    require("request_throughput" in value and "output_throughput" in value, "file", location, _ALLOWED)
    return {"sglang": "sglang bench_serving", "vllm": "vllm bench serve"}.get(result.tool, result.tool)


def _served(result: ClientResult, location: str, context: Context) -> Observation:
    """Make the cell of a run of requests, of any client."""
    report = report_of_run(result, location, 1)
    completed = report.completed or 0
    require(completed, "completed", completed, f"at least one request (in {location})")
    length = report.figures.get("Spec Decode Accept Length") or (1.0 if result.is_complete else None)
    config = _setting(report, result.fields, length, context, location)
    totals = {"prompt_tokens": report.input_tokens, "output_tokens": report.output_tokens}
    tokens = {
        name: context.number(name, location) if total is None else max(1, round(total / completed))
        for name, total in totals.items()
    }
    size = report.concurrency or context.batch or round(report.mean_in_flight or 0)
    if not size:
        allowed = f"a number, since {location} has no max_concurrency: cells need a number of requests in flight"
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
        1.0 if config.is_plain else length and min(length, config.num_steps + 1.0),
        tokens["prompt_tokens"],
        tokens["output_tokens"],
        {name: figure for name, figure in figures.items() if figure},
    )


def _setting(
    report: Report, value: Mapping[str, Any], length: float | None, context: Context, location: str
) -> SpecConfig:
    """Find the setting: counters of the client, the server's arguments in SGLang's file, or the context."""
    if report.num_rounds and report.num_drafts:
        return context.with_setting(round(report.num_drafts / report.num_rounds)).config(location)
    info = next((server for server in _servers(value) if "speculative_num_steps" in server), {})
    steps, topk, nodes = (_optional(info, name, location, most) for name, most in _ARGUMENTS.items())
    if steps:
        return context.with_setting(steps, topk, nodes).config(location)
    if length is not None and length <= _PLAIN:
        return context.with_setting(0).config(location)
    return context.config(location)


def _optional(value: Mapping[str, Any], name: str, location: str, most: int) -> int | None:
    return None if value.get(name) is None else read_integer(value[name], name, location, 0, most)


def _optional_number(value: Mapping[str, Any], name: str, location: str) -> float:
    """Read a figure for which some versions write -1, or nothing, where there is none."""
    return -1.0 if value.get(name) is None else read_number(value[name], name, location, -1.0)


def _one_batch(result: ClientResult, location: str, context: Context) -> Observation:
    """Make the cell of a batch that starts together; with a last_ttft its throughput is that of decoding."""
    value = result.fields
    size = read_integer(value["batch_size"], "batch_size", location, 1, MOST_RUNNING)
    prompt, output = (
        read_integer(value.get(name), name, location, 1, MOST_TOKENS) for name in ("input_len", "output_len")
    )
    length = _optional_number(value, "acc_length", location)
    is_plain = length <= _PLAIN
    config = (context.with_setting(0) if is_plain else context).config(location)
    latency = read_positive(value["latency"], "latency", location)
    ttft = _optional_number(value, "last_ttft", location)
    if 0 < ttft < latency:
        figures = {"decode_tokens_per_s": size * (output - 1) / (latency - ttft)}
    else:
        figures = {"tokens_per_s": size * output / latency}
    accept_length = 1.0 if is_plain else min(length, config.num_steps + 1.0)
    return Observation(f"{named(config)}, batch {size}", config, size, accept_length, prompt, output, figures)


def _latency(result: ClientResult, location: str, context: Context) -> Observation:
    """Make the cell of `vllm bench latency`, whose file has neither batch nor lengths nor acceptance."""
    size, prompt, output = (context.number(name, location) for name in ("batch", "prompt_tokens", "output_tokens"))
    return _end_to_end(
        context,
        location,
        size,
        (prompt, output),
        size * output / read_positive(result.fields["avg_latency"], "avg_latency", location),
    )


def _throughput(result: ClientResult, location: str, context: Context) -> Observation:
    """Make the cell of `vllm bench throughput`, whose file has the sum of prompt and output tokens only."""
    size, prompt, output = (context.number(name, location) for name in ("batch", "prompt_tokens", "output_tokens"))
    value = result.fields
    speed = read_positive(value["requests_per_second"], "requests_per_second", location) * output
    requests = read_integer(value.get("num_requests"), "num_requests", location, 1)
    return _end_to_end(context, location, min(size, requests), (prompt, output), speed)


def _end_to_end(context: Context, location: str, size: int, lengths: tuple[int, int], speed: float) -> Observation:
    config = context.config(location)
    length = 1.0 if config.is_plain else None
    return Observation(f"{named(config)}, batch {size}", config, size, length, *lengths, {"tokens_per_s": speed})


_READERS = {
    "sglang bench_one_batch_server": _one_batch,
    "vllm bench latency": _latency,
    "vllm bench throughput": _throughput,
}
