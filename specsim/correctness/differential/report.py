"""Printed result of a grid."""

from typing import TYPE_CHECKING

from specsim.correctness.differential.result import GridResult

if TYPE_CHECKING:
    from rich.console import Console


def show(result: GridResult, console: "Console") -> None:
    """Print a short table, then the first divergence and the verdict in words."""
    from specsim.core.display import figure, paragraph, print_table

    coverage = ", ".join(f"{name} {figure(count, 0)}" for name, count in result.coverage.items())
    compared, not_compared = (sum(result.sum(name).values()) for name in ("compared", "not_compared"))
    share = f"{result.within_rounding_share:.3%} of the decisions"
    error = max((cell.max_logprob_error for cell in result.cells), default=0.0)
    rows = [
        ("implementation", f"{result.impl} on {result.device} in {result.dtype}, against the reference"),
        ("cells", f"{len(result.cells)} of {result.num_cells}"),
        ("cells with a phase never fully compared", figure(len(result.incomplete_cells), 0)),
        ("requests a phase", f"{figure(compared, 0)} compared, {figure(not_compared, 0)} not compared"),
        ("decisions", figure(result.total("decisions"), 0)),
        ("within rounding error", f"{figure(result.total('within_rounding_error'), 0)}, {share}"),
        ("mismatches", figure(result.total("mismatches"), 0)),
        ("largest logprob error", f"{error:.1e}"),
        ("seconds", figure(result.total("seconds"))),
    ]
    print_table(console, (), rows)
    console.print()
    paragraph(console, f"Coverage: {coverage}.")
    if first := result.first_divergence:
        paragraph(console, f"First divergence: {first}.")
    reasons = result.failures()
    equal = "The implementations are equal." if result.is_complete else "The implementations are equal in these cells."
    paragraph(console, f"Not shown to be equal: {'; '.join(reasons)}." if reasons else equal)
