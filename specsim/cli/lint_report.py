"""specsim lint-report: check the figures of a benchmark's report against each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specsim.cli.option_fields import common
from specsim.cli.options import JsonOptions, report
from specsim.core.errors import InputError, require

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.lint import Finding, Stated
    from specsim.simulator.measurement import Report
    from specsim.simulator.tool_figures import ToolFigures

SHOWN = 8  # reports whose findings are all shown, beyond which they are counted
MOST_FINDINGS = 100  # findings that are all shown


@dataclass(frozen=True, kw_only=True)
class LintReportOptions(JsonOptions):
    """Options of specsim lint-report."""

    # A benchmark client's JSON or printed text, a CSV file of metric and value, an acceptance record, or metrics of
    # vLLM, SGLang or AIPerf.
    file: Annotated[Path, common("Report", is_argument=True, file="reads")]
    # Stated output tokens of each request.
    output_tokens: Annotated[int | None, common("Report", at_least=1, default="unknown")] = None
    # Stated draft tokens in each round.
    num_drafts: Annotated[int | None, common("Report", at_least=1, default="unknown")] = None


def lint_report(options: LintReportOptions) -> None:
    """Check a benchmark report for impossible figures.

    Throughput, latencies and accept lengths of one report must satisfy identities such as Little's law.

    Exit status: 0 if everything can be true, 1 if something cannot, 2 for bad input and for a report without figures
    that can be checked.

    Examples:
      specsim lint-report results.json
      specsim lint-report results.csv --output-tokens 128 --num-drafts 3
    """
    from specsim.simulator.lint import Stated, lint

    checked = _reports(options.file, Stated(options.output_tokens, options.num_drafts))
    reports = [benchmark for benchmark, *_ in checked]
    findings = [finding for benchmark, stated, parts in checked for finding in lint(benchmark, stated, parts)]
    value = {"file": str(options.file), "findings": [asdict(finding) for finding in findings]}
    is_ok = all(finding.verdict != "cannot be true" for finding in findings)
    report("lint-report", lambda console: show(reports, findings, console), value, options.json, is_ok)
    is_checked = any(finding.verdict != "follows" for finding in findings)
    require(is_checked, "file", str(options.file), "a report with figures that can be checked against each other")


def _reports(file: Path, stated: "Stated") -> "list[tuple[Report, Stated, Sequence[ToolFigures]]]":
    """Read reports with what is stated of them: those of a benchmark, and acceptance records with their parts."""
    from specsim.acceptance.files import read_records
    from specsim.simulator.lint import report_of, stated_of
    from specsim.simulator.report import read_reports

    checked: list[tuple[Report, Stated, Sequence[ToolFigures]]] = []
    refusals: list[InputError] = []
    try:
        checked += [(report, stated, ()) for report in read_reports(file)]
    except InputError as error:
        refusals.append(error)
    try:
        records = read_records(file, "file")
        records = [record for record in records if record.stated or not checked]  # others are of the reports
        checked += [(report_of(record), stated_of(record, stated), record.stated) for record in records]
    except InputError as error:
        refusals.append(error)
    if not checked:
        raise next((error for error in refusals if error.name != "file"), refusals[0])
    return checked


def show(reports: "Sequence[Report]", findings: "Sequence[Finding]", console: "Console") -> None:
    """Print derived figures, verdicts by identity, and the findings."""
    from specsim.core.display import figure, heading, print_table
    from specsim.simulator.lint import DERIVED, derived

    heading(console, "derived figures")
    rows = [(report.label, *map(figure, derived(report).values())) for report in reports]
    print_table(console, ("run", *DERIVED), rows)
    counts = Counter((finding.identity, finding.verdict) for finding in findings)
    heading(console, "identities")
    rows = [(identity, verdict, f"{count:,}") for (identity, verdict), count in counts.items()]
    print_table(console, ("identity", "", "runs"), rows)
    is_short = len(reports) <= SHOWN and len(findings) <= MOST_FINDINGS
    printed_findings = [finding for finding in findings if is_short or finding.verdict == "cannot be true"]
    if printed_findings:
        heading(console, "findings")
        print_table(
            console, ("run", "", ""), [(finding.report, finding.verdict, finding.says) for finding in printed_findings]
        )
