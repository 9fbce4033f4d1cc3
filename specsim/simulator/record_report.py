"""Acceptance records as reports, whose identities lint checks."""

from specsim.simulator.acceptance_record import AcceptanceRecord
from specsim.simulator.measurement import SPECULATION, Report
from specsim.simulator.verdict import Stated


def report_of(record: AcceptanceRecord) -> Report:
    """Make a report of a record: the accept length that its tool states, next to the counts."""
    total = record.total
    length = record.accept_length if record.reported_length is None else record.reported_length
    is_fixed = total is None or not total.reached or total.reached[0] == total.rounds  # each round has drafts
    named = f", {record.pair}" if record.pair else ""
    return Report(
        f"{record.tool}{named}",
        {SPECULATION[0]: length},
        rates_by_position=record.rates,
        num_rounds=None if total is None else total.rounds,
        num_drafts=record.proposed_drafts if record.is_chain and is_fixed else None,
        num_accepted_drafts=None if total is None else total.accepted_drafts,
        rounding=record.reported_rounding,
    )


def stated_of(record: AcceptanceRecord, stated: Stated) -> Stated:
    """Add the number of steps that a record of a chain names to what a user states."""
    if stated.num_drafts is not None or not record.is_chain:
        return stated
    return Stated(stated.output_tokens, record.num_steps)
