"""Results of benchmark clients: each run in the fields of vLLM's client, whatever client wrote it.

- GuideLLM 0.8 (benchmarks.json). Its inter_token_latency_ms is vLLM's TPOT; its own TPOT includes the first token.
- AIPerf 0.13 (profile_export_aiperf.json). Its inter token latency is vLLM's TPOT, its inter chunk latency vLLM's ITL.
- TensorRT-LLM 1.3 (the report that trtllm-bench prints).
- vLLM's `bench sweep`: a list of runs in JSON, or a row for each in CSV.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specsim.core.errors import require
from specsim.core.files import parse_json_lines
from specsim.core.limits import parse_number, read_integer, read_number
from specsim.core.table import read_table

_ALLOWED = "JSON, or a JSON object a line"
_RUNS = "a JSON object for each run"
_SUMMARY = ("request_throughput", "output_throughput")  # columns of vLLM's summary in CSV
_PERFORMANCE = "= PERFORMANCE OVERVIEW"  # a line of TensorRT-LLM's printed report


@dataclass(frozen=True, slots=True)
class ClientResult:
    """Result of one run."""

    tool: str
    fields: Mapping[str, Any]  # by vLLM's names; those of SGLang's client are its own
    rounding: float = 0.0  # half of the last printed place

    @property
    def is_complete(self) -> bool:
        """Whether its client writes all totals, and figures of drafts wherever a server drafts."""
        return self.tool in ("vllm", "sglang")


def is_summary(text: str) -> bool:
    """Whether a text is a table of vLLM's results."""
    return set(_SUMMARY) <= set(text.partition("\n")[0].strip().split(","))


def is_client_result(text: str) -> bool:
    """Whether a text is JSON, or a form in which a client writes or prints results."""
    return text.lstrip()[:1] in ("{", "[") or _PERFORMANCE in text or is_summary(text)


def client_results(text: str, location: str) -> list[ClientResult]:
    """Read the results in a text; InputError for another text."""
    if _PERFORMANCE in text:
        return list(_tensorrt_llm(text, location))
    if is_summary(text):
        return [ClientResult("vllm", _filled(row.fields)) for row in read_table(text, "file", location).rows]
    values = parse_json_lines(text, "file", location, _ALLOWED)
    require(values, "file", location, f"{_ALLOWED} (it is empty)")
    runs = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return [result for run in runs for result in _of_json(run, location)]


def _filled(fields: Mapping[str, str]) -> dict[str, Any]:
    """Convert the fields of a row; empty ones are left out."""
    return {name: parse_number(text.strip()) for name, text in fields.items() if text.strip()}


def _of_json(run: Any, location: str) -> Iterator[ClientResult]:
    require(isinstance(run, Mapping), "file", location, _RUNS)
    for key, read in _JSON_READERS.items():
        if key in run:
            yield from read(run, location)
            return
    yield ClientResult("sglang" if "mean_e2e_latency_ms" in run else "vllm", run)


def _at(value: Any, *keys: str) -> Any:
    """Look up a value under these keys; None without it."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _numbers(figures: Mapping[str, Any], location: str) -> dict[str, float]:
    """Check the figures that are there."""
    return {name: read_number(value, name, location) for name, value in figures.items() if value is not None}


_GUIDELLM = {
    "request_throughput": "requests_per_second",
    "output_throughput": "output_tokens_per_second",
    "total_token_throughput": "tokens_per_second",
}
_GUIDELLM_TIMES = {  # by vLLM's names: theirs, and milliseconds in their unit
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2el": ("request_latency", 1e3),
}
_GUIDELLM_STATISTICS = {"mean": ("mean",), "median": ("median",), "p99": ("percentiles", "p99")}


def _guidellm(report: Mapping[str, Any], location: str) -> Iterator[ClientResult]:
    """Read its benchmarks. Throughputs are means over time and not totals over the duration, which is left out."""
    benchmarks = report["benchmarks"]
    require(isinstance(benchmarks, list) and benchmarks, "benchmarks", str(type(benchmarks)), f"a list ({location})")
    for benchmark in benchmarks:
        metrics = _at(benchmark, "metrics")
        require(isinstance(metrics, Mapping), "benchmarks", location, "benchmarks with metrics")
        figures = {ours: _at(metrics, theirs, "successful", "mean") for ours, theirs in _GUIDELLM.items()}
        times = {
            f"{how}_{what}_ms": (_at(metrics, theirs, "successful", *keys), unit)
            for what, (theirs, unit) in _GUIDELLM_TIMES.items()
            for how, keys in _GUIDELLM_STATISTICS.items()
        }
        milliseconds = _numbers({name: time for name, (time, _) in times.items()}, location)
        strategy = _at(benchmark, "config", "strategy")
        yield ClientResult(
            "guidellm",
            _numbers(figures, location)
            | {name: read_number(time * times[name][1], name, location) for name, time in milliseconds.items()}
            | {
                "completed": _at(metrics, "request_totals", "successful"),
                "total_input_tokens": _at(metrics, "prompt_token_count", "successful", "total_sum"),
                "total_output_tokens": _at(metrics, "output_token_count", "successful", "total_sum"),
                "max_concurrency": _at(strategy, "max_concurrency") or _at(strategy, "streams"),
                "request_rate": _at(strategy, "rate"),
                "model_id": _at(report, "config", "backend", "model"),
            },
        )


_AIPERF = {
    "request_throughput": "request_throughput",
    "output_throughput": "output_token_throughput",
    "total_token_throughput": "total_token_throughput",
    "duration": "benchmark_duration",
    "completed": "request_count",
    "total_input_tokens": "total_isl",
    "total_output_tokens": "total_osl",
    "spec_decode_acceptance_length": "spec_decode_token_weighted_acceptance_length",
    "spec_decode_acceptance_rate": "spec_decode_overall_draft_acceptance_rate",
    "spec_decode_num_drafts": "total_spec_decode_steps",
    "spec_decode_draft_tokens": "total_draft_tokens",
    "spec_decode_accepted_tokens": "total_accepted_draft_tokens",
}
_AIPERF_TIMES = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2el": "request_latency",
}
_AIPERF_STATISTICS = {"mean": "avg", "median": "p50", "p99": "p99"}


def _aiperf(run: Mapping[str, Any], location: str) -> Iterator[ClientResult]:
    figures = {ours: _at(run, theirs, "avg") for ours, theirs in _AIPERF.items()}
    times = {
        f"{how}_{what}_ms": _at(run, theirs, key)
        for what, theirs in _AIPERF_TIMES.items()
        for how, key in _AIPERF_STATISTICS.items()
    }
    phases = _at(run, "input_config", "phases")
    last_phase = phases[-1] if isinstance(phases, list) and phases else None
    models = _at(run, "input_config", "models")
    settings = {"max_concurrency": _at(last_phase, "concurrency"), "request_rate": _at(last_phase, "rate")}
    named = {"model_id": models[0]} if isinstance(models, list) and models else {}
    yield ClientResult("aiperf", _numbers(figures | times, location) | settings | named)


_JSON_READERS: dict[str, Callable[[Mapping[str, Any], str], Iterator[ClientResult]]] = {
    "benchmarks": _guidellm,
    "aiperf_version": _aiperf,
}

_PRINTED = {
    "request_throughput": "Request Throughput (req/sec)",
    "output_throughput": "Total Output Throughput (tokens/sec)",
    "total_token_throughput": "Total Token Throughput (tokens/sec)",
    "mean_e2el_ms": "Average request latency (ms)",
    "mean_ttft_ms": "Average time-to-first-token [TTFT] (ms)",
    "mean_tpot_ms": "Average time-per-output-token [TPOT] (ms)",
    "completed": "Number of requests",
    "concurrency": "Number of concurrent requests",
    "spec_decode_acceptance_length": "[AL] AVERAGE",
    "duration": "Total Latency (ms)",
    "total_input_tokens": "Average Input Length (tokens)",
    "total_output_tokens": "Average Output Length (tokens)",
}
_LINE = re.compile(rf"({'|'.join(map(re.escape, _PRINTED.values()))}):[ \t]+(\S+)")
_PRINTED_UNIT = 0.005  # half of the last place of the accept length, which has the fewest


def _tensorrt_llm(text: str, location: str) -> Iterator[ClientResult]:
    """Read the figures of every printed report, which begins with the details of its requests."""
    for block in re.split(r"^.*= REQUEST DETAILS", text, flags=re.MULTILINE)[1:]:
        printed = {name: parse_number(value) for name, value in _LINE.findall(block)}
        figures = _numbers({ours: printed.get(theirs) for ours, theirs in _PRINTED.items()}, location)
        requests = read_integer(figures.get("completed"), _PRINTED["completed"], location)
        for name in ("total_input_tokens", "total_output_tokens"):
            if name in figures:
                figures[name] = round(read_number(figures[name] * requests, name, location))
        if "duration" in figures:
            figures["duration"] /= 1e3
        yield ClientResult("tensorrt-llm", figures, _PRINTED_UNIT)
