"""Acceptance of records by position and by depth, with intervals."""

from collections.abc import Mapping, Sequence

import numpy as np

from specsim.acceptance.interval import CONFIDENCE, rate_intervals
from specsim.core.errors import require, require_type
from specsim.plots.chart import LINES, SIZE, WIDTH
from specsim.plots.sheet import FONT, INK, Axes, FigureCanvasAgg, Picture
from specsim.simulator.acceptance_record import AcceptanceRecord

HEIGHT = 3.8
_PANELS = {
    "unconditional, by position": ("draft", "share of all rounds"),
    "conditional, by depth": ("draft", "share of rounds that reach it"),
}


def acceptance_rates(records: Mapping[str, AcceptanceRecord]) -> Picture:
    """Draw unconditional rates by position, and conditional ones by depth, a line per record.

    Bars are 95 % intervals, where the records have counts. Its alternative text says the same in words. InputError for
    no record, for more than five, and for one without rates.
    """
    require_type("records", records, Mapping, "acceptance records by their names")
    for name, each in records.items():
        require_type(name, each, AcceptanceRecord, "an acceptance record")
        require(each.rates, name, each.source, "a record with rates by position")
    require(1 <= len(records) <= len(LINES), "records", len(records), f"1 to {len(LINES)}")
    figure = Picture(figsize=(WIDTH, HEIGHT), facecolor="white")
    FigureCanvasAgg(figure)
    most = max(len(each.rates) for each in records.values())
    for place, (title, labels) in enumerate(_PANELS.items()):
        axes = figure.add_axes((0.09 + 0.5 * place, 0.15, 0.39, 0.6))
        _style(axes, title, labels, most)
        for shift, ((name, record), (color, dash)) in enumerate(zip(records.items(), LINES, strict=False)):
            rates = record.conditional if place else record.rates
            offset = 0.05 * (shift - (len(records) - 1) / 2)
            _line(axes, np.arange(1, len(rates) + 1) + offset, rates, _bars(record, bool(place)), color, dash)
            axes.lines[-1].set_gid(f"{'conditional' if place else 'unconditional'}:{name}")
    _names(figure, records)
    figure.description = _alternative_text(records)
    return figure


def _style(axes: Axes, title: str, labels: tuple[str, str], most: int) -> None:
    axes.set_title(title, family=FONT, fontsize=9, weight="bold", loc="left", parse_math=False)
    for label, write in zip(labels, (axes.set_xlabel, axes.set_ylabel), strict=True):
        write(label, family=FONT, fontsize=SIZE, color=INK)
    axes.tick_params(labelsize=SIZE, labelfontfamily=FONT)
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(0.6, most + 0.4)
    axes.set_ylim(0, 1.02)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(
    axes: Axes, places: np.ndarray, rates: Sequence[float], bars: np.ndarray | None, color: str, dash: object
) -> None:
    axes.plot(places, rates, color=color, linestyle=dash, marker="o", markersize=3.5)  # pyright: ignore[reportArgumentType]
    if bars is not None:
        axes.vlines(places, bars[0], bars[1], color=color, linewidth=1.2)


def _bars(record: AcceptanceRecord, is_conditional: bool) -> np.ndarray | None:
    """Give the ends of the intervals, f64 [2, S]; None without counts."""
    found = rate_intervals(record, is_conditional)
    return None if found is None else np.array([[each.low for each in found], [each.high for each in found]])


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
    bars = f" Bars are {CONFIDENCE:.0%} intervals." if any(each.counts for each in records.values()) else ""
    return f"Two charts of acceptance by draft. {' '.join(parts)}{bars}"
