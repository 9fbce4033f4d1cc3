"""Workloads: arrival times of requests, and the tokens of prompts and outputs, drawn from uniforms or read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require
from specsim.core.files import parse_json
from specsim.core.limits import PositiveNumber, Probability, RequestCount, Seed
from specsim.simulator.bounds import LARGEST_COUNT, count, is_number, number, positive
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms

Length = int | tuple[int, int] | str  # one for all; bounds of a uniform integer; lognormal:MEAN:CV
LOGNORMAL = "lognormal"
CHARACTERS = 4.0  # per token of English text, a common rule; a tokenizer is better


def draw(name: str, length: Length, uniforms: np.ndarray) -> np.ndarray:
    """Draw a length in tokens for each uniform in [0, 1), int64 [R].

    lognormal:MEAN:CV has this mean and this standard deviation over the mean before it is rounded, and at least 1.
    """
    if isinstance(length, str):
        from scipy.special import ndtri  # slow to load

        mean, variation = lognormal(name, length)
        sigma = np.sqrt(np.log1p(variation**2))
        uniforms = np.maximum(uniforms, 2.0**-54)  # the quantile of 0 is minus infinity
        drawn = mean * np.exp(sigma * ndtri(uniforms) - sigma**2 / 2)
        return np.clip(np.rint(drawn), 1, LARGEST_COUNT).astype(np.int64)
    least, most = length if isinstance(length, tuple) and len(length) == 2 else (length, length)
    least = count(name, least)
    return least + np.floor(uniforms * (count(name, most, least) - least + 1)).astype(np.int64)


def lognormal(name: str, text: str) -> tuple[float, float]:
    """Read mean and coefficient of variation of lognormal:MEAN:CV."""
    kind, *numbers = text.split(":")
    try:
        mean, variation = map(float, numbers if kind == LOGNORMAL else ())
        return positive(name, mean), positive(name, variation)
    except ValueError as error:
        allowed = "lognormal:MEAN:CV, the mean in tokens and the standard deviation over it: lognormal:512:0.8"
        raise InputError(name, text, allowed) from error


DAY = 86400.0  # seconds
_HALVINGS = 64


@check_arguments
@dataclass(frozen=True, slots=True)
class Arrivals:
    """Shape of an arrival process, whatever its mean rate; the default is Poisson."""

    # shape of the gamma distribution of gaps, as in vLLM's benchmark: below 1 is bursty
    burstiness: PositiveNumber = 1.0
    swing: Probability = 0.0  # amplitude of the rate over a period, relative to its mean, 0 to 1
    period: PositiveNumber = DAY  # seconds

    def at_unit_rate(self, uniforms: np.ndarray) -> np.ndarray:
        """Compute times f64 [R] at a mean rate of one a second, without the swing, from uniforms in [0, 1)."""

        from scipy.special import gammaincinv  # slow to load

        if self.burstiness == 1:
            return np.cumsum(-np.log1p(-uniforms))
        return np.cumsum(gammaincinv(self.burstiness, uniforms) / self.burstiness)

    def swung(self, seconds: np.ndarray) -> np.ndarray:
        """Move times of a constant rate so that it is 1 + swing · sin(2π t / period) times as large.

        Time t has the expected number of arrivals of t + swing · period / 2π · (1 - cos(2π t / period)) seconds, which
        bisection inverts.
        """
        if not self.swing:
            return seconds
        turn = 2 * np.pi / self.period
        low = np.maximum(seconds - 2 * self.swing / turn, 0.0)
        high = seconds.copy()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_late = middle + self.swing / turn * (1 - np.cos(turn * middle)) >= seconds
            high = np.where(is_late, middle, high)
            low = np.where(is_late, low, middle)
        return high


LATEST = 1e9  # seconds, 32 years: beyond it a double cannot represent single microseconds


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Requests by number, in the order of their arrival.

    Without arrivals_s it is a closed loop: the next request arrives as soon as fewer than `concurrency` are in flight.
    """

    prompt_tokens: np.ndarray  # int64 [R]
    output_tokens: np.ndarray  # int64 [R]
    arrivals_s: np.ndarray | None = None  # f64 [R], seconds, ascending
    concurrency: int | None = None  # most requests in flight at the client; None, with arrivals_s: no limit
    intake: float = 0.0  # seconds of the front end (connection, tokenizer) per request, one at a time
    latency: float = 0.0  # seconds of transport added to each request, in parallel
    cached_tokens: np.ndarray | None = None  # int64 [R], first tokens of each prompt in the prefix cache; None: none

    def __post_init__(self) -> None:
        for name in ("intake", "latency"):
            number(name, getattr(self, name))
        for name in ("prompt_tokens", "output_tokens"):
            object.__setattr__(self, name, _lengths(name, getattr(self, name)))
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise InputError("output_tokens", len(self.output_tokens), f"one a request, {len(self.prompt_tokens)}")
        self._check_cached()
        if self.concurrency is not None:
            count("concurrency", self.concurrency)
        if self.arrivals_s is None:
            if self.concurrency is None:
                raise InputError("concurrency", None, "an integer of at least 1 where no arrivals are given")
            return
        arrivals = np.asarray(self.arrivals_s, dtype=np.float64)
        in_order = len(arrivals) == len(self) and np.isfinite(arrivals).all() and (np.diff(arrivals) >= 0).all()
        if not in_order or arrivals[0] < 0 or arrivals[-1] > LATEST:
            allowed = f"seconds from 0 to {LATEST:g} in order, one a request"
            raise InputError("arrivals_s", arrivals.tolist()[:8], allowed)
        object.__setattr__(self, "arrivals_s", arrivals)

    def _check_cached(self) -> None:
        if self.cached_tokens is None:
            return
        cached = np.asarray(self.cached_tokens)
        fits = cached.shape == self.prompt_tokens.shape and cached.dtype.kind in "iu"
        if not fits or (cached < 0).any() or (cached >= self.prompt_tokens).any():
            allowed = "integers from 0 to one less than its prompt's tokens, one a request"
            raise InputError("cached_tokens", cached.tolist()[:8], allowed)
        object.__setattr__(self, "cached_tokens", cached.astype(np.int64))

    @property
    def cached_columns(self) -> np.ndarray:
        """Count the columns of each prompt, int64 [R], that need no prefill when its request is first admitted."""
        return np.zeros(len(self), dtype=np.int64) if self.cached_tokens is None else self.cached_tokens

    def __len__(self) -> int:
        return len(self.prompt_tokens)


@check_arguments
def closed_loop(
    num_requests: int, concurrency: int, prompt_tokens: Length, output_tokens: Length, seed: int = 0
) -> SimulatedWorkload:
    """Make `concurrency` clients; each sends its next request when its last one has ended.

    Lengths: one for all, or (least, most), the bounds of a uniform integer for each request.
    """
    lengths = _drawn(num_requests, prompt_tokens, output_tokens, seed)
    return SimulatedWorkload(*lengths, concurrency=count("concurrency", concurrency))


@check_arguments
def poisson(
    num_requests: int, rate: float, prompt_tokens: Length, output_tokens: Length, seed: int = 0
) -> SimulatedWorkload:
    """Make requests that arrive at random, `rate` a second on average."""
    return open_loop(num_requests, rate, prompt_tokens, output_tokens, seed)


@check_arguments
def open_loop(
    num_requests: RequestCount,
    rate: PositiveNumber,
    prompt_tokens: Length,
    output_tokens: Length,
    seed: Seed = 0,
    arrivals: Arrivals | None = None,
) -> SimulatedWorkload:
    """Make requests that arrive at `rate` a second on average, by default at random (Poisson)."""
    arrivals = arrivals or Arrivals()
    lengths = _drawn(num_requests, prompt_tokens, output_tokens, seed)
    times = arrivals.at_unit_rate(_uniforms(num_requests, 2, seed))
    if rate < times[-1] / LATEST:
        least = f"a number of at least {times[-1] / LATEST:.2g}"
        raise InputError("rate", rate, f"{least}, so that {num_requests} requests come within {LATEST:g} seconds")
    return SimulatedWorkload(*lengths, arrivals_s=arrivals.swung(times / rate))


def parse_workload(text: str, path: str) -> SimulatedWorkload:
    """Read lines of JSON: per request the fields arrival_s, prompt_tokens and output_tokens."""
    rows = []
    for at, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {at}"))
    require(rows, "workload", path, "a file of at least one request")
    rows.sort(key=lambda row: row.arrival_s)
    prompts = np.array([row.prompt_tokens for row in rows])
    outputs = np.array([row.output_tokens for row in rows])
    return SimulatedWorkload(prompts, outputs, np.array([row.arrival_s for row in rows]))


class _Row(NamedTuple):
    """A line of a file of requests."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def _row(line: str, location: str) -> _Row:
    allowed = f"a line that is a JSON object of {', '.join(_Row._fields)}"
    values = parse_json(line, "workload", location, allowed)
    require(isinstance(values, Mapping) and set(values) == set(_Row._fields), "workload", location, allowed)
    row = _Row(**values)
    if not is_number(row.arrival_s) or row.arrival_s < 0:
        raise InputError(
            "workload", location, f"a line whose arrival_s is a number of at least 0, not {row.arrival_s!r}"
        )
    for name in ("prompt_tokens", "output_tokens"):
        try:
            count(name, values[name])
        except InputError as error:
            allowed = f"a line whose {name} is {error.allowed}, not {error.value!r}"
            raise InputError("workload", location, allowed) from error
    return row


def _drawn(num_requests: int, prompt: Length, output: Length, seed: int) -> tuple[np.ndarray, np.ndarray]:
    count("num_requests", num_requests)
    prompts = draw("prompt_tokens", prompt, _uniforms(num_requests, 0, seed))
    return prompts, draw("output_tokens", output, _uniforms(num_requests, 1, seed))


def _uniforms(count: int, index: int, seed: int) -> np.ndarray:
    return named_uniforms(keys(seed, UniformStream.LENGTH, np.arange(count)), index)


def _lengths(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    integers = values.ndim == 1 and values.dtype.kind in "iu" and len(values)
    if not integers or values.min() < 1 or values.max() > LARGEST_COUNT:
        raise InputError(name, values.tolist()[:8], "integers of at least 1, one a request")
    return values.astype(np.int64)
