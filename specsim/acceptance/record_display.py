"""Printed form of acceptance records."""

from rich.console import Console

from specsim.core.display import figure, heading, paragraph, print_table, setting
from specsim.simulator.acceptance_record import AcceptanceRecord, Interval


def show(record: AcceptanceRecord, console: Console) -> None:
    """Print a record: accept length with its interval, and rates by position."""
    config = record.config
    named = ", ".join(part for part in (record.pair, "" if config is None else setting(config)) if part)
    heading(console, f"acceptance of {named or record.source}")
    print_table(console, (), rows(record))
    if record.rates:
        console.print()
        print_table(console, ("draft", "accepted", "after accepted ones", "rounds"), _positions(record))
    console.print()
    paragraph(console, f"Counted by {record.tool}: {record.convention}")


def rows(record: AcceptanceRecord) -> list[tuple[str, str]]:
    """List (name, value) pairs of a record's figures."""
    figures = [("accept length", f"{record.accept_length:.3f} tokens a round, bonus included{_band(record.interval)}")]
    if record.rounds is not None:
        requests = f", {len(record.counts):,} requests" if record.is_by_request else ""
        figures.append(("rounds", f"{record.rounds:,}{requests}"))
    return figures


def _band(interval: Interval | None) -> str:
    if interval is None:
        return "; no interval, for lack of counts"
    return f" ({interval.low:.3f} to {interval.high:.3f}, {interval.confidence:.0%} by {interval.method})"


def _positions(record: AcceptanceRecord) -> list[tuple[str, ...]]:
    total = record.total
    reached = () if total is None else total.reached or total.default_reached
    return [
        (str(index + 1), figure(rate, 3), figure(conditional, 3), f"{reached[index]:,}" if reached else "-")
        for index, (rate, conditional) in enumerate(zip(record.rates, record.conditional, strict=True))
    ]
