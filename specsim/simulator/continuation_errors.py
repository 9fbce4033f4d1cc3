"""Errors of continued accept lengths on published ones, and the intervals that follow from these errors."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from specsim.simulator.acceptance_record import Interval
from specsim.simulator.continuation import Rule, continued, rates_of_lengths, smoothed

TABLE = Path(__file__).parent / "tables" / "accept_lengths.csv"
CONFIDENCE = 0.9
MOST_GIVEN = 3  # series with this many given lengths or more count as alike


@dataclass(frozen=True, slots=True)
class Series:
    """Published accept lengths of one pair by number of steps."""

    source: str
    name: str
    role: str  # chosen on: the rule was chosen on it; held out: it was not
    lengths: Mapping[int, float]  # by number of steps

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"


@dataclass(frozen=True, slots=True)
class Miss:
    """A continued accept length and the published one."""

    series: str
    given: int  # lengths that were given
    ahead: int  # steps beyond the last of them
    continued: float
    published: float

    @property
    def error(self) -> float:
        """Continued over published accept length, minus 1."""
        return self.continued / self.published - 1


@cache
def published_series() -> tuple[Series, ...]:
    """Read the published accept lengths; sources and roles are columns of the table."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            lengths = found.setdefault((row["source"], row["series"], row["role"]), {})
            lengths[int(row["num_steps"])] = float(row["accept_length"])
    return tuple(Series(*key, lengths=lengths) for key, lengths in found.items())


def misses(series: Series, rule: Rule = smoothed, least_given: int = 1) -> Iterator[Miss]:
    """Leave out the last lengths of a series, one, two, ... of them, and continue the others."""
    steps = sorted(series.lengths)
    for given in range(least_given, len(steps)):
        rates = rates_of_lengths({step: series.lengths[step] for step in steps[:given]})
        start = series.lengths[steps[given - 1]]
        for step in steps[given:]:
            length = start + sum(continued(rates, step, rule)[len(rates) :])
            yield Miss(str(series), given, step - steps[given - 1], length, series.lengths[step])


@cache
def margin(given: int, ahead: int, without: str = "") -> float:
    """Compute the relative error that 90 % of the published lengths stay within, as many steps ahead or fewer.

    given: lengths that are known. without: name of a series that is left out, to test the intervals.
    """
    kept = [each for each in _all_misses() if each.series != without and min(each.given, MOST_GIVEN) == _class(given)]
    furthest = max(each.ahead for each in kept)
    by_horizon = [
        np.quantile([abs(each.error) for each in kept if each.ahead == horizon], CONFIDENCE)
        for horizon in range(1, min(ahead, furthest) + 1)
    ]
    return float(max(by_horizon, default=0.0))


def length_interval(rates: tuple[float, ...], num_steps: int) -> Interval:
    """Compute the interval of the accept length of `num_steps` steps, given rates by position of fewer.

    More steps accept at least what fewer do, and at most that and one draft more, in as many rounds as the last one.
    """
    known = 1 + sum(rates)
    lengths = known + np.cumsum([0.0, *continued(rates, num_steps)[len(rates) :]])
    margins = np.array([margin(len(rates), ahead) for ahead in range(len(lengths))])
    most = known + (len(lengths) - 1) * rates[-1]
    low = float(np.max(lengths * (1 - margins)))
    return Interval(low, min(most, float(lengths[-1] * (1 + margins[-1]))), CONFIDENCE, "errors on published series")


def coverage() -> float:
    """Compute the share of published lengths within intervals that the other series give, from two lengths on."""
    inside = []
    for series in published_series():
        for miss in misses(series, least_given=2):
            share = margin(miss.given, miss.ahead, str(series))
            inside.append(abs(miss.error) <= share)
    return float(np.mean(inside))


@cache
def _all_misses() -> tuple[Miss, ...]:
    return tuple(miss for series in published_series() for miss in misses(series))


def _class(given: int) -> int:
    return min(given, MOST_GIVEN)
