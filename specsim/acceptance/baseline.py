"""Comparison of an acceptance record with a baseline: whether the accept length fell by more than a tolerance."""

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from specsim.acceptance.interval import SEED, is_resampled, resamples, resamples_at_once, round_deviation, rounds_of
from specsim.core.errors import InputError, require
from specsim.simulator.acceptance_record import AcceptanceRecord, Interval

CONFIDENCE = 0.9  # of the two-sided interval: each end is a one-sided bound of 95 %
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """Accept length of a record over that of its baseline."""

    measured: float  # accept length
    baseline: float  # accept length
    interval: Interval  # of measured over baseline
    tolerance: float  # largest relative loss that is none

    @property
    def ratio(self) -> float:
        return self.measured / self.baseline

    @property
    def is_regression(self) -> bool:
        """Whether the loss exceeds the tolerance with 95 % confidence."""
        return self.interval.high < 1 - self.tolerance

    @property
    def is_decided(self) -> bool:
        """Whether the interval lies on one side of the tolerance."""
        return self.is_regression or self.interval.low >= 1 - self.tolerance

    def __str__(self) -> str:
        band = f"{self.interval.low - 1:+.1%} to {self.interval.high - 1:+.1%}"
        said = (
            f"accept length {self.measured:.3f}, the baseline's {self.baseline:.3f}: {self.ratio - 1:+.1%} "
            f"({band}, {self.interval.confidence:.0%} by {self.interval.method})"
        )
        if self.is_regression:
            return f"Regression: {said}; all of the interval lies below the tolerated {-self.tolerance:+.1%}."
        if self.is_decided:
            return f"No regression: {said}; none of the interval lies below the tolerated {-self.tolerance:+.1%}."
        return f"Undecided, counted as no regression: {said}; the tolerated {-self.tolerance:+.1%} lies within it."


def compare(record: AcceptanceRecord, baseline: AcceptanceRecord, tolerance: float = TOLERANCE) -> BaselineComparison:
    """Compare accept lengths, paired by request where both are of the same prompts.

    InputError for different settings, and for records without the counts that an interval needs.
    """
    require(0 <= tolerance < 1, "tolerance", tolerance, "a relative loss from 0 up to 1, such as 0.02")
    for name in ("topk", "num_steps", "num_draft_tokens", "temperature"):
        ours, theirs = getattr(record, name), getattr(baseline, name)
        if None not in (ours, theirs) and ours != theirs:
            raise InputError("baseline", f"{name} {theirs}", f"a record of the same setting: {name} {ours}")
    if is_resampled(record) and is_resampled(baseline):
        interval = _resampled(record, baseline)
    else:
        interval = _of_rounds(record, baseline)
    return BaselineComparison(record.accept_length, baseline.accept_length, interval, tolerance)


def are_paired(record: AcceptanceRecord, baseline: AcceptanceRecord) -> bool:
    """Whether both records have the same requests in the same order."""
    return bool(record.prompts) and record.prompts == baseline.prompts and len(record.counts) == len(baseline.counts)


def _resampled(record: AcceptanceRecord, baseline: AcceptanceRecord) -> Interval:
    """Compute the interval by drawing requests, the same of both where they are paired."""
    from scipy.stats import bootstrap  # slow to import, and plans need none

    sides = [(rounds_of(side) + _drafts(side), rounds_of(side)) for side in (record, baseline)]

    def length(side: int, drawn: np.ndarray, axis: int) -> np.ndarray:
        tokens, rounds = sides[side]
        return tokens[drawn].sum(axis=axis) / rounds[drawn].sum(axis=axis)

    def ratio(*drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        return length(0, drawn[0], axis) / length(1, drawn[-1], axis)

    is_paired = are_paired(record, baseline)
    places = [np.arange(len(side.counts)) for side in (record, baseline)]
    longest = max(map(len, places))
    if record.counts == baseline.counts and is_paired:
        low = high = 1.0
    else:
        result = bootstrap(
            places[:1] if is_paired else places,
            ratio,
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(SEED),
            n_resamples=resamples(longest),
            batch=resamples_at_once(longest),
        )
        low, high = map(float, result.confidence_interval)
    requests = f"{len(places[0])} pairs of requests" if is_paired else "the requests of each"
    return Interval(low, high, CONFIDENCE, f"bootstrap over {requests}")


def _drafts(record: AcceptanceRecord) -> np.ndarray:
    return np.array([counts.accepted_drafts for counts in record.counts])


def _of_rounds(record: AcceptanceRecord, baseline: AcceptanceRecord) -> Interval:
    """Compute the interval of independent rounds: the deviations of both lengths, relative to them, are added."""
    relative = []
    for side in (record, baseline):
        total = side.total
        if total is None or not total.by_position:
            allowed = "a record with counts by request or by position, which an interval needs"
            raise InputError("baseline", side.source, allowed)
        relative.append(round_deviation(total) / np.sqrt(total.rounds) / side.accept_length)
    ratio = record.accept_length / baseline.accept_length
    half = float(ndtri((1 + CONFIDENCE) / 2) * np.hypot(*relative) * ratio)
    return Interval(ratio - half, ratio + half, CONFIDENCE, "rounds taken as independent")
