"""Figures that follow from other figures of the same publication, and from closed forms."""

import csv
from pathlib import Path

from specsim.simulator.continuation import continued, published_series, rates_of_lengths
from specsim.simulator.theory import speedup

ROOT = Path(__file__).resolve().parents[2]


def ratio(over: float, under: float) -> float:
    """Divide two published figures."""
    return over / under


def percent_more(new: float, old: float) -> float:
    """Compute by how many percent a published figure exceeds another."""
    return 100 * (new / old - 1)


def closed_form(alpha: float, gamma: int, cost_ratio: float) -> float:
    """Compute the speed-up of the textbook formula (specsim.simulator.theory.speedup)."""
    return speedup(alpha, gamma, cost_ratio)


def matching_speedups(file: str) -> float:
    """Count the rows of a table whose speed-up is its own tokens/s over those without drafts, as printed."""
    with (ROOT / "papers" / file).open(newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    ratios = [(float(row["tokens_per_s"]) / float(row["plain_tokens_per_s"]), float(row["speedup"])) for row in rows]
    return float(sum(abs(ratio - printed) <= 0.005 + 1e-9 for ratio, printed in ratios))


def continued_length(series: str, given: int, num_steps: int) -> float:
    """Continue the first accept lengths of a published series to a longer chain."""
    (published,) = (candidate for candidate in published_series() if candidate.name == series)
    rates = rates_of_lengths({steps: length for steps, length in published.lengths.items() if steps <= given})
    return 1 + sum(continued(rates, num_steps))
