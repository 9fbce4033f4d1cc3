"""Means and quantiles of many values in bounded memory."""

import math

import numpy as np

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

    def add(self, values: np.ndarray) -> None:
        """Count values, float64 [n]."""
        places = np.log2(np.clip(values, _LEAST / 2, _MOST)) + 40
        bins = np.clip(np.floor(places * PER_DOUBLING).astype(np.int64) + 1, 0, _SIZE - 1)
        np.add.at(self._counts, bins, 1)
        np.add.at(self._sums, bins, values)

    @property
    def mean(self) -> float:
        count = self._counts.sum()
        return float(self._sums.sum() / count) if count else math.nan

    def at(self, share: float) -> float:
        """Compute the quantile, interpolated between ranks as numpy's default does."""
        count = int(self._counts.sum())
        if not count:
            return math.nan
        place = share * (count - 1)
        below = self._value(math.floor(place))
        above = self._value(math.ceil(place))
        return below + (above - below) * (place - math.floor(place))

    def _value(self, rank: int) -> float:
        bin_ = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return float(self._sums[bin_] / self._counts[bin_])
