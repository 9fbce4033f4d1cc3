"""Results of a simulated run: a row per request, quantiles in bounded memory, and optionally a row per step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Figures of a run, as benchmarks print them.
LATENCIES = ("TTFT", "TPOT", "ITL", "E2E Latency")
STATISTICS = ("Mean", "Median", "P99")
THROUGHPUTS = ("Output Throughput (tok/s)", "Request Throughput (req/s)", "Total Token Throughput (tok/s)")
SPECULATION = ("Spec Decode Accept Length", "Spec Decode Accept Rate (%)")
METRICS = (*THROUGHPUTS, *(f"{how} {what} (ms)" for what in LATENCIES for how in STATISTICS), *SPECULATION)
GOODPUT = "Request Goodput (req/s)"  # as vLLM's benchmark names it
ATTAINMENT = "SLO Attainment (%)"
PER_DOUBLING = 512
_LEAST = 2.0**-40
_MOST = 2.0**24
_SIZE = PER_DOUBLING * 64 + 2


class Quantiles:
    """Counts and sums of positive values in bins 0.14 % wide; a bin's value is their mean.

    So equal values are exact up to rounding, and no quantile is off by more than a bin. Values below 2^-40 or from
    2^24 on share a bin each.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_SIZE, dtype=np.int64)
        self._sums = np.zeros(_SIZE)

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Count values, float64 [n], each as often as its count says, int64 [n]."""
        places = np.log2(np.clip(values, _LEAST / 2, _MOST)) + 40
        bins = np.clip(np.floor(places * PER_DOUBLING).astype(np.int64) + 1, 0, _SIZE - 1)
        np.add.at(self._counts, bins, counts)
        np.add.at(self._sums, np.repeat(bins, counts), np.repeat(values, counts))

    @property
    def mean(self) -> float:
        count = self._counts.sum()
        return float(self._sums.sum() / count) if count else math.nan

    def at(self, share: float) -> float:
        """Compute the quantile, interpolated between ranks as numpy's default does."""
        count = int(self._counts.sum())
        if not count:
            return math.nan
        rank = share * (count - 1)
        below = self._value(math.floor(rank))
        above = self._value(math.ceil(rank))
        return below + (above - below) * (rank - math.floor(rank))

    def _value(self, rank: int) -> float:
        bin_ = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return float(self._sums[bin_] / self._counts[bin_])


QUANTILES = {"Median": 0.5, "P99": 0.99}
MILLISECONDS = 1e3


@dataclass(slots=True)
class LoggedStep:
    """One step of a simulated server."""

    start: float = 0.0  # seconds
    seconds: float = 0.0
    running: int = 0  # requests in its round
    chunks: int = 0  # number of chunks of prompts
    waiting: int = 0  # requests without a place
    prompt_tokens: int = 0  # in the chunks
    option: int = 0  # of its round, -1 without one
    pages: int = 0  # needed by the requests with a place


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A served workload, arrays by request number."""

    arrivals: np.ndarray  # f64 [R], seconds
    firsts: np.ndarray  # f64 [R], seconds of the first delivery
    lasts: np.ndarray  # f64 [R], seconds of the last delivery
    first_steps: np.ndarray  # int64 [R], step (from 0) that launched the first token
    last_steps: np.ndarray  # int64 [R], step that launched the last token
    prompt_tokens: np.ndarray  # int64 [R]
    output_tokens: np.ndarray  # int64 [R]
    rounds: np.ndarray  # int64 [R]
    drafts: np.ndarray  # int64 [R], accepted
    preemptions: np.ndarray  # int64 [R]
    gaps: Quantiles  # seconds between a request's successive deliveries, of all requests
    accepted_drafts: tuple[np.ndarray, ...]  # for each option int64 [num_steps + 1], rounds by accepted drafts
    num_steps: int
    log: Sequence[LoggedStep]  # empty unless kept

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last delivery."""
        return float(self.lasts.max() - self.arrivals.min())

    @property
    def ttft(self) -> np.ndarray:
        return self.firsts - self.arrivals

    @property
    def e2e(self) -> np.ndarray:
        return self.lasts - self.arrivals

    @property
    def tpot(self) -> np.ndarray:
        """Seconds per token after the first; nan for a request of one token."""
        more = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.lasts - self.firsts) / more

    @property
    def accept_length(self) -> float:
        """Mean tokens of a round with drafts, bonus included; 1 without such rounds."""
        rounds = sum(totals.rounds for totals in self._drafting)
        return 1 + sum(totals.accepted for totals in self._drafting) / rounds if rounds else 1.0

    @property
    def accept_rate(self) -> float:
        """Accepted over proposed drafts; nan without proposed drafts."""
        proposed = sum(totals.proposed for totals in self._drafting)
        return sum(totals.accepted for totals in self._drafting) / proposed if proposed else float("nan")

    @property
    def _drafting(self) -> list["_Drafting"]:
        """Totals of every option with drafts."""
        return [
            _Drafting(
                int(histogram.sum()),
                int(histogram @ np.arange(len(histogram))),
                int(histogram.sum()) * (len(histogram) - 1),
            )
            for histogram in self.accepted_drafts
            if len(histogram) > 1
        ]

    def metrics(self) -> dict[str, float]:
        """Compute the figures of METRICS, as vLLM's benchmark defines them.

        ITL is over the deliveries of all requests, everything else over requests.
        """
        tokens = int(self.output_tokens.sum())
        duration = self.duration
        values = {
            "Output Throughput (tok/s)": tokens / duration,
            "Request Throughput (req/s)": len(self.arrivals) / duration,
            "Total Token Throughput (tok/s)": (tokens + int(self.prompt_tokens.sum())) / duration,
            "Mean ITL (ms)": self.gaps.mean * MILLISECONDS,
            **{f"{name} ITL (ms)": self.gaps.at(share) * MILLISECONDS for name, share in QUANTILES.items()},
            "Spec Decode Accept Length": self.accept_length,
            "Spec Decode Accept Rate (%)": 100 * self.accept_rate,
        }
        for what, seconds in (("TTFT", self.ttft), ("TPOT", self.tpot), ("E2E Latency", self.e2e)):
            finite = seconds[np.isfinite(seconds)] * MILLISECONDS
            values[f"Mean {what} (ms)"] = float(finite.mean()) if len(finite) else float("nan")
            for name, share in QUANTILES.items():
                values[f"{name} {what} (ms)"] = float(np.quantile(finite, share)) if len(finite) else float("nan")
        return {name: values[name] for name in METRICS}


class _Drafting(NamedTuple):
    """Totals of one option."""

    rounds: int
    accepted: int
    proposed: int
