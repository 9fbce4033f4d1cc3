"""Results of server benchmarks, whatever client wrote them, with the numbers printed alike."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.errors import InputError, require
from specsim.core.files import read_text
from specsim.core.limits import read_integer, read_number
from specsim.simulator.client_results import ClientResult, client_results
from specsim.simulator.results import STATISTICS, THROUGHPUTS


@dataclass(frozen=True, slots=True)
class Rounded:
    """A number of at least 0 and the interval that it was rounded from; results of arithmetic keep theirs."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, half_unit: float = 0.0) -> "Rounded":
        """Make a printed number; half_unit: half of the last printed place, 0 for an exact number."""
        return cls(value, max(value - half_unit, 0.0), value + half_unit)

    def __add__(self, other: "Rounded") -> "Rounded":
        return Rounded(self.value + other.value, self.low + other.low, self.high + other.high)

    def __sub__(self, other: "Rounded") -> "Rounded":
        return Rounded(self.value - other.value, self.low - other.high, self.high - other.low)

    def __mul__(self, other: "Rounded") -> "Rounded":
        corners = [one * two for one in (self.low, self.high) for two in (other.low, other.high)]
        return Rounded(self.value * other.value, min(corners), max(corners))

    def __truediv__(self, other: "Rounded") -> "Rounded":
        """Divide by a number above 0."""
        corners = [_ratio(one, two) for one in (self.low, self.high) for two in (other.low, other.high)]
        return Rounded(_ratio(self.value, other.value), min(corners), max(corners))

    def equals(self, other: "Rounded", within: float) -> bool:
        """Whether both may stand for one number; within: relative difference that is ignored."""
        gap = max(self.low - other.high, other.low - self.high)
        return gap <= within * max(abs(self.value), abs(other.value))

    def integers(self, within: float) -> range:
        """List the integers that it may stand for; empty for a number that is not finite."""
        if not math.isfinite(self.low) or not math.isfinite(self.high):
            return range(0)
        margin = within * abs(self.value)
        return range(math.ceil(self.low - margin), math.floor(self.high + margin) + 1)


def _ratio(one: float, two: float) -> float:
    return one / two if two else math.copysign(math.inf, one)


MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True, eq=False)
class RequestDetails:
    """Successful requests; None for what the result does not contain."""

    completed: int
    input_tokens: int | None
    output_tokens: int | None
    latencies: Mapping[str, np.ndarray]  # f64, ms, by the names of measurement.LATENCIES

    def statistics(self) -> dict[str, float]:
        """Compute means, medians and 99th percentiles by the names of measurement.METRICS."""
        figures = {}
        for what, values in self.latencies.items():
            figures[f"Mean {what} (ms)"] = float(values.mean())
            figures[f"Median {what} (ms)"] = float(np.median(values))
            figures[f"P99 {what} (ms)"] = float(np.percentile(values, 99))
        return figures


def read_details(result: Mapping[str, Any], location: str) -> RequestDetails | None:
    """Read the details in a result; None without them, InputError for lists of other values."""
    lists = {
        name: _list(result, name, location) for name in ("ttfts", "itls", "latencies", "input_lens", "output_lens")
    }
    counts = {len(values) for values in lists.values() if values is not None}
    if not counts:
        return None
    if len(counts) > 1:
        raise InputError("file", location, "lists of as many entries, one a request: ttfts, itls, output_lens, ...")
    succeeded = _succeeded(result, lists["output_lens"], counts.pop())
    if not succeeded:
        return None
    chosen = {
        name: None if values is None else [values[index] for index in succeeded] for name, values in lists.items()
    }
    gaps = None if chosen["itls"] is None else [gap for gaps in chosen["itls"] for gap in _gaps(gaps, location)]
    seconds = {"TTFT": chosen["ttfts"], "ITL": gaps, "E2E Latency": chosen["latencies"]}
    return RequestDetails(
        len(succeeded),
        _total(chosen["input_lens"], "input_lens", location),
        _total(chosen["output_lens"], "output_lens", location),
        {
            what: MILLISECONDS * np.array(_numbers(values, what, location), dtype=np.float64)
            for what, values in seconds.items()
            if values
        },
    )


def _succeeded(result: Mapping[str, Any], lengths: list | None, count: int) -> list[int]:
    """List the requests that count: those without an error, or without that list those with output."""
    errors = result.get("errors")
    if isinstance(errors, list) and len(errors) == count:
        return [index for index in range(count) if not errors[index]]
    return [index for index in range(count) if lengths is None or lengths[index]]


def _list(result: Mapping[str, Any], name: str, location: str) -> list | None:
    values = result.get(name) or None
    if values is not None and not isinstance(values, list):
        raise InputError(name, values, f"a list with an entry a request (in {location})")
    return values


def _gaps(gaps: Any, location: str) -> list:
    if not isinstance(gaps, list):
        raise InputError("itls", gaps, f"lists of numbers (in {location})")
    return gaps


def _numbers(values: list, name: str, location: str) -> list:
    return [read_number(value, name, location) for value in values]


def _total(values: list | None, name: str, location: str) -> int | None:
    return None if values is None else sum(read_integer(value, name, location) for value in values)


_SHARED = {
    "Output Throughput (tok/s)": "output_throughput",
    "Request Throughput (req/s)": "request_throughput",
    **{
        f"{how} {what} (ms)": f"{how.lower()}_{what.lower()}_ms"
        for what in ("TTFT", "TPOT", "ITL")
        for how in STATISTICS
    },
}
_VLLM = _SHARED | {
    "Total Token Throughput (tok/s)": "total_token_throughput",
    **{f"{how} E2E Latency (ms)": f"{how.lower()}_e2el_ms" for how in STATISTICS},
    "Spec Decode Accept Length": "spec_decode_acceptance_length",
    "Spec Decode Accept Rate (%)": "spec_decode_acceptance_rate",
}
_SGLANG = _SHARED | {
    "Total Token Throughput (tok/s)": "total_throughput",
    **{f"{how} E2E Latency (ms)": f"{how.lower()}_e2e_latency_ms" for how in STATISTICS},
    "Spec Decode Accept Length": "accept_length",
}
_ALLOWED = "a result of a benchmark by vLLM, SGLang, GuideLLM, AIPerf or TensorRT-LLM"
_RATES = "spec_decode_per_position_acceptance_rates"


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one run of a benchmark; None for what it does not contain."""

    label: str
    figures: Mapping[str, float]  # by the names of METRICS
    concurrency: int | None = None  # most requests in flight
    duration: float | None = None  # seconds
    completed: int | None = None  # requests
    input_tokens: int | None = None  # total
    output_tokens: int | None = None  # total
    rates_by_position: tuple[float, ...] = ()  # unconditional acceptance
    rate: float | None = None  # requests/s that the client was set to; None also for no limit
    num_rounds: int | None = None  # rounds with drafts
    num_drafts: int | None = None  # proposed
    num_accepted_drafts: int | None = None
    mean_in_flight: float | None = None  # requests in flight on average, as the client measured
    details: RequestDetails | None = None
    rounding: float = 0.0  # half of the last printed place of figures, duration, rates in percent; 0: more places

    def figure(self, name: str) -> Rounded | None:
        """Look up a figure, with all numbers that are printed alike."""
        value = self.figures.get(name)
        return None if value is None else Rounded.of(value, self.rounding)


def read_results(path: Path) -> list[Report]:
    """Read the runs of `vllm bench serve`, SGLang's bench_serving or another client; InputError for another file."""
    results = client_results(read_text(path, "file", "a UTF-8 file that can be read"), str(path))
    return [report_of_run(result, str(path), run) for run, result in enumerate(results, start=1)]


def report_of_run(result: ClientResult, location: str, run: int) -> Report:
    """Read the figures of one run; errors name `location`."""
    value = result.fields
    names = _SGLANG if result.tool == "sglang" else _VLLM
    if result.is_complete:
        for name in ("duration", "total_input_tokens", "total_output_tokens", "completed"):
            _require_field(value, name, location)
    duration = _number(value, "duration", location)
    input_tokens = _count(value, "total_input_tokens", location)
    output_tokens = _count(value, "total_output_tokens", location)
    figures = {ours: figure for ours, name in names.items() if (figure := _number(value, name, location)) is not None}
    for name in THROUGHPUTS[:2]:
        require(name in figures, "file", location, f"{_ALLOWED} (it has no {names[name]})")
    if result.tool == "sglang" and "Total Token Throughput (tok/s)" not in figures and duration:
        figures["Total Token Throughput (tok/s)"] = ((input_tokens or 0) + (output_tokens or 0)) / duration
    rates = value.get(_RATES) or ()
    require(isinstance(rates, (list, tuple)), _RATES, type(rates), f"a list of numbers from 0 to 1 (in {location})")
    return Report(
        f"{result.tool}, run {run}",
        figures,
        concurrency=None if _is_unlimited(value, "max_concurrency") else _count(value, "max_concurrency", location),
        duration=duration,
        completed=_count(value, "completed", location),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        rates_by_position=tuple(read_number(rate, _RATES, location, 0, 1) for rate in rates),
        rate=None if _is_unlimited(value, "request_rate") else _number(value, "request_rate", location),
        num_rounds=_count(value, "spec_decode_num_drafts", location),
        num_drafts=_count(value, "spec_decode_draft_tokens", location),
        num_accepted_drafts=_count(value, "spec_decode_accepted_tokens", location),
        mean_in_flight=_number(value, "concurrency", location),
        details=read_details(value, location),
        rounding=result.rounding,
    )


def _is_unlimited(value: Mapping, name: str) -> bool:
    """Check whether an option of the client is no limit: null, `inf` (a number or a text) or `trace`."""
    return value.get(name) in (None, "inf", "trace", math.inf)


def _count(value: Mapping, name: str, location: str) -> int | None:
    return None if value.get(name) is None else read_integer(value[name], name, location)


def _number(value: Mapping, name: str, location: str) -> float | None:
    return None if value.get(name) is None else read_number(value[name], name, location)


def _require_field(value: Mapping, name: str, location: str) -> None:
    require(value.get(name) is not None, "file", location, f"{_ALLOWED} (it has no {name})")
