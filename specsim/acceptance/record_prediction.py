"""Printed acceptance records, and accept lengths of other settings that follow from one; nothing runs."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from specsim.acceptance.interval import with_interval
from specsim.core.config import SpecConfig
from specsim.core.display import figure, heading, paragraph, print_table, rounds_text, setting, short_setting
from specsim.core.files import without_nan
from specsim.simulator.acceptance import accept_length
from specsim.simulator.acceptance_record import AcceptanceRecord, Interval
from specsim.simulator.rank_by_depth import rank_by_depth
from specsim.simulator.record_shares import DEPTH, predicted_interval, record_shares, setting_acceptance

# The setting that `predict` records, and those whose accept lengths are predicted.
RECORDED = SpecConfig(topk=8, num_steps=6, num_draft_tokens=64)
_TREES = {
    (2, 2): (4, 7),
    (2, 3): (6, 10),
    (2, 4): (8, 14),
    (2, 6): (8, 16),
    (3, 3): (8, 12),
    (3, 4): (10, 20),
    (3, 5): (10, 24),
    (4, 2): (6, 12),
    (4, 3): (8, 16),
    (4, 4): (16, 32),
    (4, 6): (16, 48),
    (8, 3): (16, 32),
}
SETTINGS = (
    *(SpecConfig(1, num_steps, num_steps + 1) for num_steps in range(1, 7)),
    *(SpecConfig(*tree, size) for tree, sizes in _TREES.items() for size in sizes),
)


def show_record(record: AcceptanceRecord, console: Console) -> None:
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
        undrafted = record.total.undrafted if record.total else 0
        figures.append(("rounds", f"{rounds_text(record.rounds, undrafted)}{requests}"))
    if record.mean_drafts is not None and (full := record.full):
        varying = f"{record.mean_drafts:.2f} on average of at most {len(record.rates)}: their number varies"
        figures.append(("drafts a round", varying))
        band = "" if full.low == full.high else f", {full.low:.3f} to {full.high:.3f}"
        length = f"{1 + sum(full.rates):.3f} tokens a round{band}, if their number does not depend on the text"
        figures.append(("with all drafts", length))
    return figures


def _band(interval: Interval | None) -> str:
    if interval is None:
        return "; no interval, for lack of counts"
    return f" ({interval.low:.3f} to {interval.high:.3f}, {interval.confidence:.0%} by {interval.method})"


def _positions(record: AcceptanceRecord) -> list[tuple[str, ...]]:
    reached = record.reached
    return [
        (str(index + 1), figure(rate, 3), figure(conditional, 3), f"{reached[index]:,}" if reached else "-")
        for index, (rate, conditional) in enumerate(zip(record.rates, record.conditional, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class ExpectedLength:
    """Accept length of one setting."""

    config: SpecConfig
    accept_length: float  # accept length, in tokens per round, bonus token included
    interval: Interval | None  # interval of a chain that is longer than the record's; None for others
    is_measured: bool  # whether it is the record's own setting


@dataclass(frozen=True, slots=True)
class RecordPrediction:
    """Accept lengths that follow from one record."""

    record: AcceptanceRecord
    assumed: tuple[str, ...]  # what the record does not say, a clause for each
    rows: tuple[ExpectedLength, ...]

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        lengths = [asdict(row) for row in self.rows]
        return without_nan({"record": self.record.to_json(), "assumed": self.assumed, "rows": lengths})


def predict_from(record: AcceptanceRecord) -> RecordPrediction:
    """Compute the accept lengths of chains up to 8 drafts, and of trees where second-best drafts are known."""
    shares = record_shares(record)
    measured = record.config
    depth = max(DEPTH, record.num_steps or 0)
    configs = [SpecConfig(1, steps, steps + 1) for steps in range(1, depth + 1)]
    width = len(shares.shares[0])
    configs += [config for config in SETTINGS if 1 < config.topk <= width and config.num_steps <= shares.num_measured]
    if measured is not None and measured not in configs:
        configs.append(measured)
    lengths = [_expected(record, config, measured) for config in configs if config.num_steps <= len(shares.shares)]
    return RecordPrediction(with_interval(record), shares.assumed, tuple(lengths))


def _expected(record: AcceptanceRecord, config: SpecConfig, measured: SpecConfig | None) -> ExpectedLength:
    if config == measured and record.mean_drafts is None:
        return ExpectedLength(config, record.accept_length, None, True)
    if config.topk == 1:
        length = accept_length(rank_by_depth(record_shares(record, config.num_steps).shares, config))
    else:
        length = accept_length(setting_acceptance(record, config))
    return ExpectedLength(config, length, predicted_interval(record, config), False)


def show(prediction: RecordPrediction, console: Console) -> None:
    """Print the record, the assumptions, and a row per setting."""
    record = prediction.record
    named = "a setting that is not known" if record.config is None else setting(record.config)
    heading(console, f"accept lengths that follow from {record.source} ({record.tool}, {named})")
    print_table(console, (), rows(record))
    console.print()
    table = [
        (
            short_setting(row.config),
            figure(row.accept_length, 3),
            "-" if row.interval is None else f"{row.interval.low:.3f} to {row.interval.high:.3f}",
            "measured" if row.is_measured else "",
        )
        for row in prediction.rows
    ]
    print_table(console, ("setting", "accept length", "90% interval", ""), table)
    if prediction.assumed:
        console.print()
        paragraph(console, f"Assumed: {'; '.join(prediction.assumed)}.")
