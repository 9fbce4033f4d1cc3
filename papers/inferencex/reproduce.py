"""Errors of the rules that continue accept lengths to more steps: `python -m papers.inferencex.reproduce`."""

import numpy as np
from rich.console import Console

from specsim.core.display import heading, paragraph, print_table, stdout_console
from specsim.simulator.continuation import (
    CONFIDENCE,
    SHRINKAGE,
    Miss,
    Rule,
    line_in_logits,
    margin,
    misses,
    published_series,
    smoothed,
)

ROLES = ("chosen on", "held out")
LEAST_GIVEN = 2  # one length determines no slope


def unshrunk(conditional: np.ndarray, reach: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Expect conditional rates on the line of least squares in logits."""
    return line_in_logits(conditional, reach, positions, 0.0)


def constant(conditional: np.ndarray, reach: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Expect the mean conditional rate of all positions, as if drafts were accepted independently."""
    return np.full(len(positions), (conditional * reach).sum() / reach.sum())


def last(conditional: np.ndarray, reach: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Expect the last conditional rate."""
    return np.full(len(positions), conditional[-1])


RULES: dict[str, Rule] = {"smoothed": smoothed, "unshrunk line": unshrunk, "constant": constant, "last rate": last}


def coverage() -> float:
    """Compute the share of published lengths within intervals that the other series give, from two lengths on."""
    inside = []
    for series in published_series():
        for miss in misses(series, least_given=2):
            share = margin(miss.num_lengths, miss.ahead, str(series))
            inside.append(abs(miss.error) <= share)
    return float(np.mean(inside))


def show(console: Console) -> None:
    """Print errors by rule and role, by series, and the intervals that follow."""
    heading(console, "errors of continued accept lengths on published series, from two lengths on")
    rows = []
    for name, rule in RULES.items():
        for role in ROLES:
            chosen = [series for series in published_series() if series.role == role]
            rows.append((name, role, *_errors([m for series in chosen for m in misses(series, rule, LEAST_GIVEN)])))
    print_table(console, ("rule", "series", "next: mean", "all: mean", "all: worst", "number"), rows)
    paragraph(
        console,
        f"next: the length left out is the one after those given. smoothed: a line in logits of the conditional rates, "
        f"its slope shrunk towards 0 with weight {SHRINKAGE:g}, which was chosen on the series of that role.",
    )
    heading(console, "the smoothed rule by series")
    rows = [
        (series.name, series.source, series.role, *_errors(list(misses(series, least_given=LEAST_GIVEN))))
        for series in published_series()
    ]
    print_table(console, ("series", "source", "role", "next: mean", "all: mean", "all: worst", "number"), rows)
    heading(console, f"half-width of the {CONFIDENCE:.0%} interval, by given lengths and steps ahead")
    ahead = (1, 2, 3, 4, 5)
    rows = [(str(num_lengths), *(f"{margin(num_lengths, step):.1%}" for step in ahead)) for num_lengths in (1, 2, 3)]
    print_table(console, ("given", *map(str, ahead)), rows)
    paragraph(console, f"Intervals of the other series hold {coverage():.1%} of the lengths of a series left out.")


def _errors(chain_misses: list[Miss]) -> tuple[str, ...]:
    following = [abs(miss.error) for miss in chain_misses if miss.ahead == 1]
    everything = [abs(miss.error) for miss in chain_misses]
    return (
        f"{np.mean(following):.2%}",
        f"{np.mean(everything):.2%}",
        f"{max(everything):.2%}",
        str(len(everything)),
    )


if __name__ == "__main__":
    show(stdout_console())
