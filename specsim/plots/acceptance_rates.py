"""Acceptance by position and by depth: of records with intervals, assumed distributions, and rounds that were run."""

from collections.abc import Mapping, Sequence

import numpy as np

from specsim.acceptance.interval import CONFIDENCE, rate_intervals
from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_type
from specsim.core.metrics import Acceptance
from specsim.plots.sheet import (
    CHART_WIDTH,
    FONT,
    LINES,
    SIZE,
    Axes,
    End,
    FigureCanvasAgg,
    Picture,
    label_axes,
    label_ends,
    new_chart,
)
from specsim.simulator.acceptance import Distribution, accept_length
from specsim.simulator.acceptance_record import AcceptanceRecord

HEIGHT = 3.8
_PANELS = {
    "unconditional, by position": ("draft", "share of all rounds"),
    "conditional, by depth": ("draft", "share of rounds that reach it"),
}


@check_arguments
def acceptance_rates(records: Mapping[str, AcceptanceRecord]) -> Picture:
    """Draw unconditional rates by position, and conditional ones by depth, a line per record.

    Bars are 95 % intervals, where the records have counts. Its alternative text says the same in words. InputError for
    no record, for more than five, and for one without rates.
    """
    for name, record in records.items():
        require_type(name, record, AcceptanceRecord, "an acceptance record")
        require(record.rates, name, record.source, "a record with rates by position")
    require(1 <= len(records) <= len(LINES), "records", len(records), f"1 to {len(LINES)}")
    figure = Picture(figsize=(CHART_WIDTH, HEIGHT), facecolor="white")
    FigureCanvasAgg(figure)
    most = max(len(record.rates) for record in records.values())
    for panel, (title, labels) in enumerate(_PANELS.items()):
        axes = figure.add_axes((0.09 + 0.5 * panel, 0.15, 0.39, 0.6))
        label_axes(axes, title, *labels, 9)
        axes.set_xticks(range(1, most + 1))
        axes.set_xlim(0.6, most + 0.4)
        axes.set_ylim(0, 1.02)
        for shift, ((name, record), (color, dash)) in enumerate(zip(records.items(), LINES, strict=False)):
            rates = record.conditional if panel else record.rates
            offset = 0.05 * (shift - (len(records) - 1) / 2)
            _line(axes, np.arange(1, len(rates) + 1) + offset, rates, _bars(record, bool(panel)), color, dash)
            axes.lines[-1].set_gid(f"{'conditional' if panel else 'unconditional'}:{name}")
    _names(figure, records)
    figure.description = _alternative_text(records)
    return figure


def _line(
    axes: Axes, positions: np.ndarray, rates: Sequence[float], bars: np.ndarray | None, color: str, dash: object
) -> None:
    axes.plot(positions, rates, color=color, linestyle=dash, marker="o", markersize=3.5)  # pyright: ignore[reportArgumentType]
    if bars is not None:
        axes.vlines(positions, bars[0], bars[1], color=color, linewidth=1.2)


def _bars(record: AcceptanceRecord, is_conditional: bool) -> np.ndarray | None:
    """Give the ends of the intervals, f64 [2, S]; None without counts."""
    intervals = rate_intervals(record, is_conditional)
    return (
        None
        if intervals is None
        else np.array([[interval.low for interval in intervals], [interval.high for interval in intervals]])
    )


def _names(figure: Picture, records: Mapping[str, AcceptanceRecord]) -> None:
    """Write the name of every record with its accept length, in the colour of its line."""
    for row, ((name, record), (color, _)) in enumerate(zip(records.items(), LINES, strict=False)):
        interval = record.interval
        band = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"
        text = f"{name}: {record.accept_length:.2f} tokens a round{band}"
        figure.text(0.09 + 0.5 * (row % 2), 0.95 - 0.05 * (row // 2), text, color=color, family=FONT, fontsize=SIZE,
                    parse_math=False)  # fmt: skip


def _alternative_text(records: Mapping[str, AcceptanceRecord]) -> str:
    """Say in words what the picture shows."""
    parts = []
    for name, record in records.items():
        rates = ", ".join(f"{rate:.2f}" for rate in record.rates)
        conditional = ", ".join("none" if np.isnan(rate) else f"{rate:.2f}" for rate in record.conditional)
        parts.append(
            f"{name} accepts {record.accept_length:.2f} tokens a round; the share of rounds that accept draft 1, 2, "
            f"... is {rates}; of those that reach it, {conditional}."
        )
    bars = f" Bars are {CONFIDENCE:.0%} intervals." if any(record.counts for record in records.values()) else ""
    return f"Two charts of acceptance by draft. {' '.join(parts)}{bars}"


@check_arguments
def positions(distributions: Mapping[str, Distribution]) -> Picture:
    """Draw the share of rounds that accept at least 1, 2, ... drafts, a line per distribution.

    Its name stands with its accept length. InputError for no distribution, or for more than five.
    """
    for name, distribution in distributions.items():
        require(
            hasattr(distribution, "rates"),
            "distributions",
            name,
            "names of distributions of specsim.simulator.acceptance",
        )
    require(1 <= len(distributions) <= len(LINES), "distributions", len(distributions), f"1 to {len(LINES)}")
    return _lines(
        {
            name: (accept_length(distribution), distribution.rates().tolist())
            for name, distribution in distributions.items()
        }
    )


@check_arguments
def acceptance(results: Mapping[str, Acceptance]) -> Picture:
    """Draw the share of rounds that accepted at least 1, 2, ... drafts, a line per result with its accept length.

    results: Generation.acceptance by a name. InputError for no result, more than five, or one without a round.
    """
    for name, result in results.items():
        require_type(name, result, Acceptance, "a Generation's acceptance")
        require(result.rounds, name, result.rounds, "a result of at least one round")
    require(1 <= len(results) <= len(LINES), "results", len(results), f"1 to {len(LINES)}")
    return _lines({name: (result.accept_length, list(result.accepted_by_position)) for name, result in results.items()})


def _lines(results: Mapping[str, tuple[float, list[float]]]) -> Picture:
    """Draw a line per name, through its share of rounds at each position; the value begins with the accept length."""
    names = {name: f"{name}: {length:.2f}" for name, (length, _) in results.items()}
    title = "accepted by position, and tokens a round"
    figure, axes = new_chart(title, "draft", "share of the rounds", names=names.values())
    most = max(1, *(len(rates) for _, rates in results.values()))
    ends = []
    for (name, (_, shares)), (color, dash) in zip(results.items(), LINES, strict=False):
        rates = [1.0, *shares]
        look = {"color": color, "linestyle": dash, "marker": "o", "markersize": 3.5}
        axes.plot(range(len(rates)), rates, gid=f"distribution:{name}", **look)
        ends.append(End(rates[-1], len(rates) - 1, names[name], color))
    axes.set_xticks(range(most + 1))
    axes.set_xlim(0, most)
    axes.set_ylim(0, 1.02)
    label_ends(axes, ends)
    return figure
