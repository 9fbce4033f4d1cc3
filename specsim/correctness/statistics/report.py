"""Law tests as a person reads them."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

INTRODUCTION = (
    "A narrow target whose law is known by heart (16 tokens; each depends on the two before it), a drafter that likes "
    "what the target dislikes, and whole engines: requests, KV slots, drafts, verify, commit. Every token is held "
    "against its law given the tokens before it, and once more those that begin a round. p: at most this, whatever the "
    "number of tokens. Chi-square / df is near 1 for a right law. Noticed: the least total variation that the test "
    "would have rejected with probability 0.99, where it is spread over all contexts."
)
COLUMNS = ("verifier", "column", "sampling", "tokens", "borders", "length", "chi²/df", "p at most", "noticed")
CONTROL_COLUMNS = ("what", "tokens", "chi²/df", "p at most")


def show(laws: Any, console: "Console") -> None:
    """A table of the tests, one of the controls, and the verdict in words."""
    from specsim.core.display import heading, paragraph, print_table

    paragraph(console, INTRODUCTION)
    heading(console, "Tests")
    print_table(console, COLUMNS, [_cells(row) for row in laws.rows if not row.is_control])
    if controls := [row for row in laws.rows if row.is_control]:
        heading(console, "Wrong on purpose")
        print_table(console, CONTROL_COLUMNS, [_control(row) for row in controls])
    console.print()
    paragraph(console, _verdict(laws))


def _cells(row: Any) -> tuple[str, ...]:
    noticed = "-" if math.isnan(row.noticed) else f"{row.noticed:.3f}"
    counts = f"{row.tokens:,}", f"{row.borders:,}", f"{row.accept_length:.2f}"
    return row.what, row.impl, row.sampling, *counts, _ratio(row), f"{row.p_value:.1g}", noticed


def _control(row: Any) -> tuple[str, ...]:
    return row.what, f"{row.tokens:,}", _ratio(row), f"{row.p_value:.0e}" if row.p_value else "0"


def _ratio(row: Any) -> str:
    """Of chi-square to its degrees of freedom; `-` where there are too few tokens for any."""
    found = row.chi_square
    return f"{found.statistic / found.degrees_of_freedom:.2f}" if found.degrees_of_freedom else "-"


def _verdict(laws: Any) -> str:
    tests = [row for row in laws.rows if not row.is_control]
    told = (
        f"{len(tests)} tests of {sum(row.tokens for row in tests):,} tokens in {laws.seconds:.0f} s, seed {laws.seed}. "
    )
    told += f"A law is rejected below p = {tests[0].bound:.1e}, so that a right engine fails any of the tests with a "
    told += f"probability of at most {laws.false_alarm:.0e}. "
    if laws.failures:
        return f"{told}Not as it should be: {'; '.join(laws.failures)}."
    wrong = len(laws.rows) - len(tests)
    return f"{told}None is rejected." + (f" All {wrong} that are wrong on purpose are." if wrong else "")
