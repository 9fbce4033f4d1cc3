"""Confidence intervals of acceptance records: a bootstrap over requests, or else over independent rounds."""

from dataclasses import replace

import numpy as np
from scipy.special import ndtri

from specsim.simulator.acceptance_record import AcceptanceRecord, Counts, Interval

CONFIDENCE = 0.95
RESAMPLES = 9999
FEWEST_RESAMPLES = 999
_MOST_DRAWS = 20_000_000  # of requests, over all resamples
_BATCH_DRAWS = 2_000_000  # of requests at once
SEED = 0
LEAST_REQUESTS = 2


def with_interval(record: AcceptanceRecord) -> AcceptanceRecord:
    """Add the interval of the accept length to a record that has none."""
    return record if record.interval is not None else replace(record, interval=length_interval(record))


def length_interval(record: AcceptanceRecord) -> Interval | None:
    """Compute the interval of an accept length; None without counts that determine one.

    Requests differ more than rounds of one request do, so that the bootstrap draws requests. A record without requests
    gives the interval of independent rounds, which is too short.
    """
    if is_resampled(record):
        tokens = np.array([counts.rounds + counts.accepted_drafts for counts in record.counts])
        low, high = bootstrap_ratio(tokens, rounds_of(record))
        return Interval(low, high, CONFIDENCE, f"bootstrap over {len(tokens)} requests")
    total = record.total
    if total is None or not total.by_position or total.rounds < LEAST_REQUESTS:
        return None
    half = float(_quantile() * round_deviation(total) / np.sqrt(total.rounds))
    length = record.accept_length
    return Interval(max(length - half, 1.0), length + half, CONFIDENCE, "rounds taken as independent")


def rate_intervals(record: AcceptanceRecord, is_conditional: bool = False) -> list[Interval] | None:
    """Compute an interval of the rate at each position; None without the counts that it needs."""
    total = record.total
    reached = record.reached
    if total is None or not total.by_position or (is_conditional and not reached):
        return None
    depth = len(total.by_position)
    tried = reached if is_conditional else (total.rounds,) * depth
    if not is_resampled(record) or not all(counts.by_position for counts in record.counts):
        return [_wilson(count, number) for count, number in zip(total.by_position, tried, strict=True)]
    rows = [_padded(counts, depth) for counts in record.counts]
    accepted = np.array([row.by_position for row in rows])
    reached_rounds = np.array([row.reached or row.default_reached for row in rows]) if is_conditional else None
    intervals = []
    for position in range(depth):
        below = rounds_of(record) if reached_rounds is None else reached_rounds[:, position]
        low, high = bootstrap_ratio(accepted[:, position], below) if below.sum() else (float("nan"),) * 2
        intervals.append(Interval(low, high, CONFIDENCE, f"bootstrap over {len(rows)} requests"))
    return intervals


def bootstrap_ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Compute the percentile interval of a ratio of sums over requests.

    A draw of requests without rounds that count takes the ratio of all requests.
    """
    from scipy.stats import bootstrap  # slow to import, and plans need none

    overall = float(above.sum() / below.sum())
    if np.all(above * below.sum() == below * above.sum()):  # all requests are alike
        return overall, overall

    def ratio(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        total = below[drawn].sum(axis=axis)
        return np.where(total, above[drawn].sum(axis=axis) / np.maximum(total, 1), overall)

    places = np.arange(len(above))
    result = bootstrap(
        (places,),
        ratio,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
        n_resamples=resamples(len(above)),
        batch=resamples_at_once(len(above)),
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def resamples(requests: int) -> int:
    """Choose the number of resamples, fewer for many requests."""
    return max(FEWEST_RESAMPLES, min(RESAMPLES, _MOST_DRAWS // requests))


def resamples_at_once(requests: int) -> int:
    """Choose the number of resamples that are in memory at once."""
    return max(1, _BATCH_DRAWS // requests)


def is_resampled(record: AcceptanceRecord) -> bool:
    """Whether a record has requests to draw from."""
    return record.is_by_request and len(record.counts) >= LEAST_REQUESTS


def rounds_of(record: AcceptanceRecord) -> np.ndarray:
    """List the rounds of every request."""
    return np.array([counts.rounds for counts in record.counts])


def round_deviation(total: Counts) -> float:
    """Compute the standard deviation of the accepted drafts of a round from the counts by position."""
    shares = np.array(total.by_position) / total.rounds
    squares = (2 * np.arange(1, len(shares) + 1) - 1) @ shares  # a square is a sum of odd numbers
    return float(np.sqrt(max(squares - shares.sum() ** 2, 0.0)))


def _padded(counts: Counts, length: int) -> Counts:
    """Extend the counts of a request by positions that none of its rounds accepted."""
    missing = (0,) * (length - len(counts.by_position))
    reached = (counts.reached or counts.default_reached) + missing
    if missing and not counts.reached:
        reached = Counts(counts.rounds, counts.accepted_drafts, counts.by_position + missing).default_reached
    return Counts(counts.rounds, counts.accepted_drafts, counts.by_position + missing, reached)


def _wilson(count: int, number: int) -> Interval:
    """Compute Wilson's interval of a share of independent rounds."""
    if not number:
        return Interval(float("nan"), float("nan"), CONFIDENCE, "no rounds")
    squared = _quantile() ** 2
    share = count / number
    middle = (share + squared / (2 * number)) / (1 + squared / number)
    half = np.sqrt(share * (1 - share) / number * squared + (squared / (2 * number)) ** 2) / (1 + squared / number)
    return Interval(float(middle - half), float(middle + half), CONFIDENCE, "rounds taken as independent")


def _quantile() -> float:
    return float(ndtri((1 + CONFIDENCE) / 2))
