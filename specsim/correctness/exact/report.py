"""Certificates as a person reads them."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

INTRODUCTION = (
    "Every drafted tree and every region of the uniforms was enumerated in fractions, and the verifier called in each. "
    "Distance: total variation of the law of S + 1 tokens from the target's, exact. Accepted: expected drafts a round. "
    "Optimum: the most that any rule can accept which keeps a path of the tree, adds one token and leaves the target's "
    "law as it is (a linear programme's bound, in fractions too). 24 bits: at most what uniforms of 24 bits instead of "
    "uniform ones add to the distance."
)
COLUMNS = ("verifier", "law", "column", "distance", "accepted", "optimum", "gap", "24 bits")
_SHORT = 4096


def show(certificates: Any, console: "Console") -> None:
    """A table a case, what is wrong on purpose, and the verdict in words."""
    from specsim.core.display import heading, paragraph, print_table

    paragraph(console, INTRODUCTION)
    rows = [row for row in certificates.rows if row.promise != "wrong"]
    for case, group in groupby(sorted(rows, key=lambda row: _place(row, rows)), key=lambda row: row.case):
        heading(console, case)
        print_table(console, COLUMNS, [_cells(row) for row in group])
    if controls := [row for row in certificates.rows if row.promise == "wrong"]:
        heading(console, "Wrong on purpose")
        columns = ("what", "on", "distance", "never the target's")
        print_table(console, columns, [_control(row) for row in controls])
    console.print()
    if certificates.left_out:
        paragraph(console, f"The fast column was not run on: {'; '.join(certificates.left_out)}.")
    paragraph(console, _verdict(certificates))


def _place(row: Any, rows: Sequence[Any]) -> int:
    """Cases in the order in which they are first met."""
    return [other.case for other in rows].index(row.case)


def _cells(row: Any) -> tuple[str, ...]:
    gap = "-" if row.gap is None else f"{float(row.gap):.4f}" if row.gap else "0"
    grid = f"{float(row.grid):.0e}" if row.grid else "-"
    return (
        *(row.verifier, row.promise, row.impl, exact(row.total_variation)),
        *(f"{float(row.accepted):.4f}", f"{float(row.optimum):.4f}", gap, grid),
    )


def _control(row: Any) -> tuple[str, ...]:
    return row.verifier, row.case, exact(row.total_variation), exact(row.impossible)


def exact(value: Fraction) -> str:
    """A fraction, or its decimals where it is a long one."""
    return str(value) if value.denominator <= _SHORT else f"{float(value):.2e}"


def _verdict(certificates: Any) -> str:
    if certificates.failures:
        return f"Not as promised: {'; '.join(certificates.failures)}."
    promises = [row.promise for row in certificates.rows]
    if "lossless" not in promises:
        return "None of them says that it keeps the target's law."
    told = f" The {promises.count('wrong')} that are wrong on purpose do not." if "wrong" in promises else ""
    return f"All {promises.count('lossless')} that say they are lossless have exactly the target's law.{told}"
