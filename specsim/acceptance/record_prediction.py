"""Accept lengths of other settings that follow from an acceptance record; nothing runs."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from specsim.acceptance.interval import with_interval
from specsim.acceptance.prediction_settings import SETTINGS
from specsim.acceptance.record_display import rows
from specsim.core.config import SpecConfig
from specsim.core.display import figure, heading, paragraph, print_table, setting, short_setting
from specsim.core.files import without_nan
from specsim.simulator.acceptance import accept_length
from specsim.simulator.acceptance_record import AcceptanceRecord, Interval
from specsim.simulator.rank_by_depth import rank_by_depth
from specsim.simulator.record_shares import DEPTH, predicted_interval, record_shares, setting_acceptance


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
    measured_config = record.config
    depth = max(DEPTH, record.num_steps or 0)
    configs = [SpecConfig(1, steps, steps + 1) for steps in range(1, depth + 1)]
    configs += [
        config for config in SETTINGS if 1 < config.topk <= len(shares.shares[0]) and config.num_steps <= shares.known
    ]
    if measured_config is not None and measured_config not in configs:
        configs.append(measured_config)
    lengths = [
        _expected(record, config, measured_config) for config in configs if config.num_steps <= len(shares.shares)
    ]
    return RecordPrediction(with_interval(record), shares.assumed, tuple(lengths))


def _expected(record: AcceptanceRecord, config: SpecConfig, measured_config: SpecConfig | None) -> ExpectedLength:
    if config == measured_config:
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
