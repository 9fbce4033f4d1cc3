"""Printed form of rows and verdicts."""

import math

from rich.console import Console

from specsim.bench.result import Result
from specsim.bench.roofline import Peaks
from specsim.bench.row import Row, Timing
from specsim.core.display import figure, near, paragraph, print_table


def show_peaks(peaks: Peaks, console: Console) -> None:
    """Print the measured peaks of this run."""
    paragraph(
        console,
        f"Measured peaks of this run: {peaks.read / 1e12:.2f} TB/s read, {peaks.copy / 1e12:.2f} TB/s copied, "
        f"{peaks.dense / 1e12:.0f} TFLOP/s of dense bf16.",
    )


def setting_of(row: Row) -> str:
    """Print a row's setting."""
    values = {name: f"{value:,}" if type(value) is int else value for name, value in row.setting.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def microseconds(timing: Timing) -> str:
    """Print a median with its spread."""
    digits = 1 if timing.median_us < 1000 else 0
    return f"{timing.median_us:,.{digits}f} us ±{timing.spread / 2:.1f} %"


def show_row(row: Row, console: Console) -> None:
    """Print a row in a few lines; only equal implementations have times."""
    out = console.out
    out(f"{row.name}: {setting_of(row)}", highlight=False)
    for name, check in row.checks.items():
        if check.passed:
            time = microseconds(row.timings[name]) if name in row.timings else "equal"
            out(f"    {name}: {time}", highlight=False)
        else:
            reason = check.difference or f"error {check.error:.3g}, allowed {check.limit:.3g}"
            out(f"    {name}: NOT EQUAL, so no time: {check.compared}: {reason}", highlight=False)
    if not math.isnan(row.ratio):
        out(f"    roofline bound: {figure(row.bound_us, 1)} us; ours / bound {figure(row.ratio)}", highlight=False)
    if row.figures:
        out("    " + "; ".join(f"{name} {value:,.4g}" for name, value in row.figures.items()), highlight=False)
    for each in row.targets:
        verdict = "reached" if each.reached else "NOT reached"
        out(f"    {each.name}: {near(each.value, each.limit)}; target {figure(each.limit)}, {verdict}", highlight=False)
    for note in row.notes:
        out(f"    {note}", highlight=False)


def show_bound(row: Row, console: Console) -> None:
    """Print the bytes of a row's roofline bound, tensor by tensor."""
    if row.bound is None or not row.bound.parts:
        return
    console.print()
    console.out(f"Roofline bound of {row.name}, {setting_of(row)}: {row.bound.bytes:,} bytes", highlight=False)
    print_table(
        console, ("tensor", "times", "bytes"), [(p.tensor, f"{p.count}", f"{p.bytes:,}") for p in row.bound.parts]
    )


def show(result: Result, console: Console) -> None:
    """Print the roofline bounds of rows that differ by their tensors, then the verdict."""
    shown = set()
    for row in result.rows:
        kind = row.bound and (row.name, tuple(part.tensor for part in row.bound.parts))
        if kind and kind not in shown:
            shown.add(kind)
            show_bound(row, console)
    console.print()
    targets = [each for row in result.rows for each in row.targets]
    reached = sum(each.reached for each in targets)
    if not result.is_complete:
        paragraph(console, f"The suite is not complete: {len(result.rows)} rows in {result.seconds:.0f} s.")
    failed = sum(not row.passed for row in result.rows)
    equal = "Every equality check passed" if result.passed else f"NOT EQUAL in {failed} of {len(result.rows)} rows"
    paragraph(console, f"{equal}; {reached} of {len(targets)} targets are reached.")
