"""Workloads: which requests come when, each with its prompt's tokens and the tokens that it puts out."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specsim.core.errors import InputError
from specsim.core.files import read_text
from specsim.simulator.uniforms import Stream, keys, named_uniforms

Length = int | tuple[int, int]
_FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")
_LONGEST = 2**31


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by number, in the order of their arrival.

    prompt_tokens, output_tokens: int64 [R]. arrivals_s: seconds, float64 [R], never before the one before; None: a
    closed loop, in which the next request arrives as soon as fewer than `concurrency` are under way. With arrivals_s
    concurrency is None, or the most that the client lets be under way: who comes later is sent later.
    """

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    arrivals_s: np.ndarray | None = None
    concurrency: int | None = None

    def __post_init__(self):
        for name in ("prompt_tokens", "output_tokens"):
            object.__setattr__(self, name, _lengths(name, getattr(self, name)))
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise InputError("output_tokens", len(self.output_tokens), f"one a request, {len(self.prompt_tokens)}")
        if self.concurrency is not None:
            check_count("concurrency", self.concurrency)
        if self.arrivals_s is None:
            if self.concurrency is None:
                raise InputError("concurrency", None, "an integer of at least 1 where no arrivals are given")
            return
        arrivals = np.asarray(self.arrivals_s, dtype=np.float64)
        in_order = len(arrivals) == len(self) and np.isfinite(arrivals).all() and (np.diff(arrivals) >= 0).all()
        if not in_order or arrivals[0] < 0:
            raise InputError("arrivals_s", arrivals.tolist()[:8], "seconds of at least 0 in order, one a request")
        object.__setattr__(self, "arrivals_s", arrivals)

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def closed_loop(
    num_requests: int, concurrency: int, prompt_tokens: Length, output_tokens: Length, seed: int = 0
) -> Workload:
    """`concurrency` clients, each sending its next request when the one before has ended.

    Lengths: one for all, or (least, most) of which each request has a whole number at random, all equally likely.
    """
    lengths = _drawn(num_requests, prompt_tokens, output_tokens, seed)
    return Workload(*lengths, concurrency=check_count("concurrency", concurrency))


def poisson(num_requests: int, rate: float, prompt_tokens: Length, output_tokens: Length, seed: int = 0) -> Workload:
    """Requests that come by themselves, `rate` of them a second on average."""
    lengths = _drawn(num_requests, prompt_tokens, output_tokens, seed)
    uniforms = _uniforms(num_requests, 2, seed)
    return Workload(*lengths, arrivals_s=np.cumsum(-np.log1p(-uniforms)) / _positive("rate", rate))


def bursts(
    num_requests: int, size: int, every_s: float, prompt_tokens: Length, output_tokens: Length, seed: int = 0
) -> Workload:
    """`size` requests at once, and again after every `every_s` seconds."""
    lengths = _drawn(num_requests, prompt_tokens, output_tokens, seed)
    waves = np.arange(num_requests) // check_count("size", size)
    return Workload(*lengths, arrivals_s=waves * _positive("every_s", every_s))


def read_workload(path: Path | str) -> Workload:
    """A file of JSON lines, a request a line with the fields arrival_s, prompt_tokens and output_tokens."""
    path, rows = Path(path), []
    text = read_text(path, "workload", "a UTF-8 file that can be read")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {number}"))
    if not rows:
        raise InputError("workload", str(path), "a file of at least one request")
    arrivals, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    order = np.argsort(arrivals, kind="stable")
    return Workload(prompts[order], outputs[order], arrivals[order])


def _row(line: str, place: str) -> tuple[float, int, int]:
    allowed = f"a line that is a JSON object of {', '.join(_FIELDS)}"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("workload", place, allowed) from error
    if not isinstance(values, Mapping) or set(values) != set(_FIELDS):
        raise InputError("workload", place, allowed)
    arrival, *tokens = (values[name] for name in _FIELDS)
    if type(arrival) not in (int, float) or not 0 <= arrival <= sys.float_info.max:
        raise InputError("workload", place, f"a line whose arrival_s is a number of at least 0, not {arrival!r}")
    for name, value in zip(_FIELDS[1:], tokens, strict=True):
        if type(value) is not int or not 1 <= value < _LONGEST:
            raise InputError("workload", place, f"a line whose {name} is an integer of at least 1, not {value!r}")
    return float(arrival), *tokens


def _drawn(num_requests: int, prompt: Length, output: Length, seed: int) -> tuple[np.ndarray, np.ndarray]:
    check_count("num_requests", num_requests)
    drawn = []
    for index, (name, length) in enumerate((("prompt_tokens", prompt), ("output_tokens", output))):
        least, most = length if isinstance(length, tuple) and len(length) == 2 else (length, length)
        check_count(name, least)
        check_count(name, most, least)
        drawn.append(least + np.floor(_uniforms(num_requests, index, seed) * (most - least + 1)).astype(np.int64))
    return tuple(drawn)


def _uniforms(count: int, index: int, seed: int) -> np.ndarray:
    return named_uniforms(keys(seed, Stream.LENGTH, np.arange(count)), index)


def _lengths(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    integers = values.ndim == 1 and values.dtype.kind in "iu" and len(values)
    if not integers or values.min() < 1 or values.max() >= _LONGEST:
        raise InputError(name, values.tolist()[:8], "integers of at least 1, one a request")
    return values.astype(np.int64)


def check_count(name: str, value: object, least: int = 1) -> int:
    """An integer within bounds; InputError otherwise."""
    if type(value) is not int or not least <= value < _LONGEST:
        raise InputError(name, value, f"an integer from {least} to 2^31 - 1")
    return value


def _positive(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise InputError(name, value, "a number above 0")
    return float(value)
