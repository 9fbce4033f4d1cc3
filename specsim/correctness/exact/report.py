"""Certificates as printed."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # certificates imports this module
    from rich.console import Console

    from specsim.correctness.exact.certificates import Certificate, Certificates

INTRODUCTION = (
    "Every drafted tree and every region of the uniforms was enumerated in fractions, and the verifier called in each. "
    "Distance: exact total variation of S + 1 tokens from the target's distribution. Accepted: expected drafts per "
    "round. Optimum: the most that any rule can accept which keeps a path of the tree, adds one token and preserves "
    "the target's distribution (a linear programme's bound, in fractions too). 24 bits: bound on the distance added by "
    "uniforms of 24 bits instead of continuous ones."
)
COLUMNS = ("verifier", "promise", "impl", "distance", "accepted", "optimum", "gap", "24 bits")
_SHORT = 4096


def show(certificates: "Certificates", console: "Console") -> None:
    """Print a table per case, the controls, and the verdict in words."""
    from specsim.core.display import heading, paragraph, print_table

    paragraph(console, INTRODUCTION)
    rows = [row for row in certificates.rows if row.promise != "wrong"]
    for case, group in groupby(sorted(rows, key=lambda row: _place(row, rows)), key=lambda row: row.case):
        heading(console, case)
        print_table(console, COLUMNS, [_cells(row) for row in group])
    if controls := [row for row in certificates.rows if row.promise == "wrong"]:
        heading(console, "Wrong on purpose")
        columns = ("control", "case", "distance", "never the target's")
        print_table(console, columns, [_control(row) for row in controls])
    console.print()
    if certificates.left_out:
        paragraph(console, f"The fast implementation was not run on: {'; '.join(certificates.left_out)}.")
    paragraph(console, _verdict(certificates))


def _place(row: "Certificate", rows: Sequence["Certificate"]) -> int:
    """The case's place in the order of the rows."""
    return [other.case for other in rows].index(row.case)


def _cells(row: "Certificate") -> tuple[str, ...]:
    gap = "-" if row.gap is None else f"{float(row.gap):.4f}" if row.gap else "0"
    grid = f"{float(row.grid):.0e}" if row.grid else "-"
    return (
        *(row.verifier, row.promise, row.impl, exact(row.total_variation)),
        *(f"{float(row.accepted):.4f}", f"{float(row.optimum):.4f}", gap, grid),
    )


def _control(row: "Certificate") -> tuple[str, ...]:
    return row.verifier, row.case, exact(row.total_variation), exact(row.impossible)


def exact(value: Fraction) -> str:
    """A fraction, or its decimals where it is a long one."""
    return str(value) if value.denominator <= _SHORT else f"{float(value):.2e}"


def _verdict(certificates: "Certificates") -> str:
    if certificates.failures:
        return f"Not as promised: {'; '.join(certificates.failures)}."
    promises = [row.promise for row in certificates.rows]
    if "lossless" not in promises:
        return "None of them promises to preserve the target's distribution."
    kept = f"All {promises.count('lossless')} lossless certificates hold: the distribution is exactly the target's."
    return f"{kept} The {promises.count('wrong')} controls have another." if "wrong" in promises else kept
