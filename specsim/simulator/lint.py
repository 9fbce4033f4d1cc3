"""Identities of a benchmark's report: figures that cannot be true, and others that follow."""

from collections.abc import Callable
from dataclasses import dataclass

from specsim.simulator import acceptance_identities as acceptance
from specsim.simulator import serving_identities as serving
from specsim.simulator.measurement import Report
from specsim.simulator.rounded import Rounded
from specsim.simulator.verdict import NOTHING_STATED, Stated, Verdict, Verdicts


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of an identity on one report."""

    report: str  # its label
    identity: str
    verdict: Verdict
    says: str  # the reason, with figures


def lint(report: Report, stated: Stated = NOTHING_STATED) -> list[Finding]:
    """Check every identity that the report has the figures for.

    A mean TPOT or ITL of 0 counts as missing: clients write it where they measured nothing. A printed figure stands for
    all numbers that are printed alike.
    """
    return [
        Finding(report.label, identity, verdict, says)
        for identity, check in IDENTITIES.items()
        for verdict, says in check(report, stated)
    ]


IDENTITIES: dict[str, Callable[[Report, Stated], Verdicts]] = {
    "accept length = 1 + K · accept rate": acceptance.check_rate,
    "accept length ≤ drafts + 1": acceptance.check_length,
    "accepted ≤ proposed drafts": acceptance.check_counts,
    "accept length = 1 + Σ rates by position": acceptance.check_positions,
    "E2E = TTFT + (L - 1) · TPOT": serving.check_latency,
    "requests/s · E2E ≤ concurrency": serving.check_in_flight,
    "throughput · duration = total": serving.check_totals,
    "median ≤ P99": serving.check_order,
    "ITL / TPOT = tokens a delivery": serving.check_delivery,
    "statistics = those of the requests listed": serving.check_details,
    "round = accept length · TPOT": acceptance.check_round,
}
DERIVED: dict[str, Callable[[Report], Rounded | None]] = {
    "prompt": serving.prompt_tokens,
    "output": serving.output_tokens,
    "by times": serving.decoded_tokens,
    "drafts": acceptance.num_drafts,
    "under way": serving.in_flight,
}


def derived(report: Report) -> dict[str, float | None]:
    """Derive further figures: tokens of a prompt, of an output by rates and by times, drafts, requests."""
    found = {name: derive(report) for name, derive in DERIVED.items()}
    return {name: None if figure is None else figure.value for name, figure in found.items()}
