"""Identities of the acceptance figures in a benchmark's report."""

from itertools import pairwise

from specsim.simulator.measurement import Report
from specsim.simulator.rounded import Rounded
from specsim.simulator.verdict import EXACT, Stated, Verdicts, identity

ONE = Rounded.of(1)
PERCENT = Rounded.of(100)
_LENGTH = "Spec Decode Accept Length"
_RATE = "Spec Decode Accept Rate (%)"


def num_drafts(report: Report) -> Rounded | None:
    """Derive the drafts of a round: (accept length - 1) / accept rate."""
    length = report.figure(_LENGTH)
    rate = report.figure(_RATE)
    return PERCENT * (length - ONE) / rate if length is not None and rate is not None and rate.value else None


def check_rate(report: Report, stated: Stated) -> Verdicts:
    """Compare accept length and rate: some number of drafts a round has to give both.

    The report may count the drafts itself.
    """
    length = report.figure(_LENGTH)
    rate = report.figure(_RATE)
    if length is not None and length.high < 1:
        yield "cannot be true", f"accept length {length.value:g}: a round gives at least its bonus token"
    if rate is not None and rate.low > 100:
        yield "cannot be true", f"accept rate {rate.value:g} %: more accepted than proposed"
    if length is None or rate is None or length.high < 1 or report.num_drafts is not None:
        return
    drafts = num_drafts(report)
    if drafts is None:
        yield identity("accept length", length, "1 + K · 0 =", ONE)
        return
    whole = drafts.integers(3 * EXACT)
    if whole.stop <= max(whole.start, 1):
        bonus = (PERCENT * length / rate).integers(3 * EXACT)
        hint = f"; {bonus[0]} drafts do without the bonus token" if bonus else ""
        both = f"accept length {length.value:g} at {rate.value:g} %"
        yield "cannot be true", f"{both}: no number of drafts gives both{hint}"
        return
    nearest = min(max(round(drafts.value), whole.start, 1), whole.stop - 1)
    yield "holds", f"{length.value:g} = 1 + {nearest} · {rate.value / 100:.4f}"
    if stated.num_drafts is not None and stated.num_drafts not in whole:
        yield "cannot be true", f"{stated.num_drafts} drafts a round as stated: the figures are those of {nearest}"


def check_length(report: Report, stated: Stated) -> Verdicts:
    """Compare the accept length with the most that the stated drafts give, or the positions that are reported."""
    length = report.figure(_LENGTH)
    drafts = stated.num_drafts or len(report.rates_by_position)
    if length is None or not drafts:
        return
    if length.low > (1 + drafts) * (1 + EXACT):
        yield "cannot be true", f"accept length {length.value:g} with {drafts} drafts a round: at most {drafts + 1}"
    else:
        yield "holds", f"{length.value:g} is at most {drafts} + 1"


def check_counts(report: Report, stated: Stated) -> Verdicts:
    """Compare rounds, proposed and accepted drafts with each other, and with the figures made of them."""
    rounds = report.num_rounds
    drafts = report.num_drafts
    accepted = report.num_accepted_drafts
    length = report.figure(_LENGTH)
    rate = report.figure(_RATE)
    if drafts is not None and accepted is not None and accepted > drafts:
        yield "cannot be true", f"{accepted:,} drafts accepted of {drafts:,} proposed"
    if drafts and accepted is not None and rate is not None:
        yield identity("accept rate", rate, "100 · accepted / proposed drafts", Rounded.of(100 * accepted / drafts))
    if rounds and accepted is not None and length is not None:
        yield identity("accept length", length, "1 + accepted drafts / rounds", Rounded.of(1 + accepted / rounds))
    if rounds is None or drafts is None:
        return
    if drafts < rounds:
        yield "cannot be true", f"{drafts:,} drafts in {rounds:,} rounds that drafted"
    elif stated.num_drafts is not None and drafts > stated.num_drafts * rounds:
        most = f"{stated.num_drafts} drafts a round as stated"
        yield "cannot be true", f"{most}: {drafts:,} were proposed in {rounds:,} rounds"
    elif rounds:
        yield "follows", f"{drafts / rounds:.2f} drafts a round on average"


def check_positions(report: Report, _: Stated) -> Verdicts:
    """Compare the rates by position with each other and with the accept length."""
    rates = [Rounded.of(rate, report.rounding / 100) for rate in report.rates_by_position]
    length = report.figure(_LENGTH)
    if not rates:
        return
    if any(later.low > earlier.high + EXACT for earlier, later in pairwise(rates)):
        listed = ", ".join(f"{rate.value:g}" for rate in rates)
        yield "cannot be true", f"unconditional rates {listed}: they increase"
    if length is not None:
        yield identity("accept length", length, "1 + the sum of the rates by position", sum(rates, ONE))


def check_round(report: Report, _: Stated) -> Verdicts:
    """Derive the time of a round."""
    length = report.figure(_LENGTH)
    tpot = report.figure("Mean TPOT (ms)")
    if length is not None and tpot is not None and length.value and tpot.value:
        yield "follows", f"a round of a request takes {length.value * tpot.value:.2f} ms"
