"""Accept lengths at more steps than were measured, with intervals from errors on published ones."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import Interval
from specsim.simulator.bounds import integer, number

SHRINKAGE = 0.3  # weight of a slope of 0 in the smoothed rule
_LEAST = 1e-3  # conditional rates are kept this far from 0 and 1 in logits
_SMALLEST_GAIN = 1e-4  # tokens a round, where a longer chain was measured not to accept more
_HALVINGS = 60  # of an interval of rates, beyond the digits of a double

Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def rates_of_lengths(lengths: Mapping[int, float]) -> tuple[float, ...]:
    """Compute unconditional rates by position from accept lengths by number of steps.

    A longer chain accepts what a shorter one does, so that the gain of step k is the share of rounds that accept draft
    k. Measured gains that rise are replaced by their monotone regression. Steps between two lengths share one
    conditional rate.
    """

    rates: list[float] = []
    length = 1.0
    for steps, accept_length in sorted(lengths.items()):
        integer("accept_lengths", steps)
        missing = steps - len(rates)
        number("accept_lengths", accept_length, 1, steps + 1)
        rates += _equal_conditional(rates[-1] if rates else 1.0, max(accept_length - length, _SMALLEST_GAIN), missing)
        length = accept_length
    return _never_rising(np.clip(rates, 0, 1))


def _never_rising(values: np.ndarray) -> tuple[float, ...]:
    """Compute the monotone regression: least squares among sequences that never rise, by pooling neighbours.

    scipy has the same and takes half a second to load, which a plan does not have.
    """
    blocks: list[list[float]] = []
    for value in values.tolist():
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-1]) > np.mean(blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    return tuple(float(np.mean(block)) for block in blocks for _ in block)


def lengths_in_order(lengths: Sequence[float]) -> dict[int, float]:
    """Number the accept lengths of 1, 2, ... steps; InputError for one that no chain has."""
    for steps, length in enumerate(lengths, start=1):
        if not 1 <= length <= steps + 1:
            allowed = "accept lengths of 1, 2, ... steps, bonus included: from 1 to the steps + 1"
            raise InputError("accept_lengths", tuple(lengths), allowed)
    if not lengths or lengths[-1] < lengths[0]:
        raise InputError("accept_lengths", tuple(lengths), "accept lengths of 1, 2, ... steps, in this order")
    return dict(enumerate(lengths, start=1))


def continued(rates: Sequence[float], num_steps: int, rule: Rule | None = None) -> tuple[float, ...]:
    """Continue unconditional rates to `num_steps` by the conditional rates that a rule expects there.

    rule: the smoothed one unless given.
    """
    if num_steps <= len(rates) or not rates:
        return tuple(rates[:num_steps])
    values = np.asarray(rates, dtype=float)
    reach = np.concatenate(([1.0], values[:-1]))
    reached = reach > 0
    conditional = values[reached] / reach[reached]
    further = np.arange(len(values) + 1, num_steps + 1)
    expected = np.clip((rule or smoothed)(conditional, reach[reached], further), 0, 1)
    return (*values.tolist(), *(values[-1] * np.cumprod(expected)).tolist())


def smoothed(conditional: np.ndarray, reach: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Expect conditional rates on a line in logits, its slope shrunk towards 0.

    A rate counts by the square of the share of rounds that reach it: an accept length of fixed precision gives a
    conditional rate of an error that grows as fewer rounds reach it.
    """
    return line_in_logits(conditional, reach, positions, SHRINKAGE)


def line_in_logits(conditional: np.ndarray, reach: np.ndarray, positions: np.ndarray, shrinkage: float) -> np.ndarray:
    """Expect conditional rates on the line of least squares in logits, its slope shrunk by a weight."""
    bounded = np.clip(conditional, _LEAST, 1 - _LEAST)
    logits = np.log(bounded / (1 - bounded))
    weights = reach**2
    places = np.arange(1, len(logits) + 1) - np.average(np.arange(1, len(logits) + 1), weights=weights)
    level = np.average(logits, weights=weights)
    spread = (weights * places**2).sum() + shrinkage
    slope = (weights * places * (logits - level)).sum() / spread if spread else 0.0
    return 1 / (1 + np.exp(-(level + slope * (places[0] - 1 + positions))))


def _equal_conditional(before: float, gain: float, steps: int) -> list[float]:
    """Split a gain in accept length over some steps of one conditional rate."""
    if steps == 1:
        return [gain]
    exponents = np.arange(1, steps + 1)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_less = before * (middle**exponents).sum() < gain
        low, high = (middle, high) if is_less else (low, middle)
    return (before * high**exponents).tolist()


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
    num_lengths: int  # lengths that were given
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
    lengths_by_series: dict[tuple[str, str, str], dict[int, float]] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            lengths = lengths_by_series.setdefault((row["source"], row["series"], row["role"]), {})
            lengths[int(row["num_steps"])] = float(row["accept_length"])
    return tuple(Series(*key, lengths=lengths) for key, lengths in lengths_by_series.items())


def misses(series: Series, rule: Rule = smoothed, least_given: int = 1) -> Iterator[Miss]:
    """Leave out the last lengths of a series, one, two, ... of them, and continue the others."""
    steps = sorted(series.lengths)
    for num_lengths in range(least_given, len(steps)):
        rates = rates_of_lengths({step: series.lengths[step] for step in steps[:num_lengths]})
        start = series.lengths[steps[num_lengths - 1]]
        for step in steps[num_lengths:]:
            length = start + sum(continued(rates, step, rule)[len(rates) :])
            yield Miss(str(series), num_lengths, step - steps[num_lengths - 1], length, series.lengths[step])


@cache
def margin(num_lengths: int, ahead: int, without: str = "") -> float:
    """Compute the relative error that 90 % of the published lengths stay within, as many steps ahead or fewer.

    num_lengths: lengths that are known. without: name of a series that is left out, to test the intervals.
    """
    alike = [
        miss
        for miss in _all_misses()
        if miss.series != without and min(miss.num_lengths, MOST_GIVEN) == _class(num_lengths)
    ]
    furthest = max(miss.ahead for miss in alike)
    by_horizon = [
        np.quantile([abs(miss.error) for miss in alike if miss.ahead == horizon], CONFIDENCE)
        for horizon in range(1, min(ahead, furthest) + 1)
    ]
    return float(max(by_horizon, default=0.0))


def length_interval(rates: tuple[float, ...], num_steps: int) -> Interval:
    """Compute the interval of the accept length of `num_steps` steps, given rates by position of fewer.

    More steps accept at least what fewer do, and at most that and one draft more, in as many rounds as the last one.
    """
    measured_length = 1 + sum(rates)
    lengths = measured_length + np.cumsum([0.0, *continued(rates, num_steps)[len(rates) :]])
    margins = np.array([margin(len(rates), ahead) for ahead in range(len(lengths))])
    most = measured_length + (len(lengths) - 1) * rates[-1]
    low = float(np.max(lengths * (1 - margins)))
    return Interval(low, min(most, float(lengths[-1] * (1 + margins[-1]))), CONFIDENCE, "errors on published series")


@cache
def _all_misses() -> tuple[Miss, ...]:
    return tuple(miss for series in published_series() for miss in misses(series))


def _class(num_lengths: int) -> int:
    return min(num_lengths, MOST_GIVEN)
