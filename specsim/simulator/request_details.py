"""Figures of every request in a client's result, as vLLM's and SGLang's benchmarks can write them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.core.errors import InputError
from specsim.core.limits import read_integer, read_number

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
        found = {}
        for what, values in self.latencies.items():
            found[f"Mean {what} (ms)"] = float(values.mean())
            found[f"Median {what} (ms)"] = float(np.median(values))
            found[f"P99 {what} (ms)"] = float(np.percentile(values, 99))
        return found


def read_details(result: Mapping[str, Any], place: str) -> RequestDetails | None:
    """Read the details in a result; None without them, InputError for lists of other values."""
    lists = {name: _list(result, name, place) for name in ("ttfts", "itls", "latencies", "input_lens", "output_lens")}
    counts = {len(values) for values in lists.values() if values is not None}
    if not counts:
        return None
    if len(counts) > 1:
        raise InputError("file", place, "lists of as many entries, one a request: ttfts, itls, output_lens, ...")
    kept = _succeeded(result, lists["output_lens"], counts.pop())
    if not kept:
        return None
    chosen = {name: None if values is None else [values[each] for each in kept] for name, values in lists.items()}
    gaps = None if chosen["itls"] is None else [gap for gaps in chosen["itls"] for gap in _gaps(gaps, place)]
    seconds = {"TTFT": chosen["ttfts"], "ITL": gaps, "E2E Latency": chosen["latencies"]}
    return RequestDetails(
        len(kept),
        _total(chosen["input_lens"], "input_lens", place),
        _total(chosen["output_lens"], "output_lens", place),
        {
            what: MILLISECONDS * np.array(_numbers(values, what, place), dtype=np.float64)
            for what, values in seconds.items()
            if values
        },
    )


def _succeeded(result: Mapping[str, Any], lengths: list | None, count: int) -> list[int]:
    """List the requests that count: those without an error, or without that list those with output."""
    errors = result.get("errors")
    if isinstance(errors, list) and len(errors) == count:
        return [each for each in range(count) if not errors[each]]
    return [each for each in range(count) if lengths is None or lengths[each]]


def _list(result: Mapping[str, Any], name: str, place: str) -> list | None:
    values = result.get(name) or None
    if values is not None and not isinstance(values, list):
        raise InputError(name, values, f"a list with an entry a request (in {place})")
    return values


def _gaps(gaps: Any, place: str) -> list:
    if not isinstance(gaps, list):
        raise InputError("itls", gaps, f"lists of numbers (in {place})")
    return gaps


def _numbers(values: list, name: str, place: str) -> list:
    return [read_number(value, name, place) for value in values]


def _total(values: list | None, name: str, place: str) -> int | None:
    return None if values is None else sum(read_integer(value, name, place) for value in values)
