"""Reader of benchmark clients' results: vLLM's and SGLang's, as JSON or as printed."""

from pathlib import Path

from specsim.acceptance.content import Content
from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts
from specsim.simulator.measurement import SPECULATION, Report
from specsim.simulator.report import read_reports

FORMAT = "the results of `vllm bench serve` and SGLang's bench_serving, as JSON or printed"
CONVENTION = "accept lengths include the bonus token, accepted tokens count drafts only, rates are unconditional."


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the runs of a result that had drafts; [] for another file."""
    try:
        reports = read_reports(Path(content.source))
    except InputError:
        return []
    return [record for report in reports if (record := _record(content, report)) is not None]


def _record(content: Content, report: Report) -> AcceptanceRecord | None:
    length = report.figures.get(SPECULATION[0])
    tool = report.label.partition(",")[0]
    if length is None:
        return None
    rounds = report.num_rounds
    accepted = report.num_accepted_drafts
    rates = report.rates_by_position
    if not rounds or accepted is None:
        steps = len(rates) or None
        return AcceptanceRecord(content.source, tool, CONVENTION, length, num_steps=steps, rates=rates)
    counts = tuple(round(rate * rounds) for rate in rates)
    is_exact = bool(rates) and sum(counts) == accepted
    drafts = report.num_drafts
    steps = len(rates) or (drafts // rounds if drafts and drafts % rounds == 0 else None)
    total = Counts(rounds, accepted, counts if is_exact else ())
    return AcceptanceRecord(
        content.source, tool, CONVENTION, 1 + accepted / rounds, topk=1, num_steps=steps, counts=(total,), rates=rates
    )
