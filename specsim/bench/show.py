"""Rows and verdicts as a person reads them."""

import math

from rich.console import Console

from specsim.bench.result import Result
from specsim.bench.roofline import Ceilings
from specsim.bench.row import Row, Timing
from specsim.core.display import figure, paragraph, print_table


def show_ceilings(ceilings: Ceilings, console: Console) -> None:
    """Show the peaks that this run measured."""
    paragraph(
        console,
        f"Ceilings of this run: {ceilings.read / 1e12:.2f} TB/s read, {ceilings.copy / 1e12:.2f} TB/s copied, "
        f"{ceilings.dense / 1e12:.0f} TFLOP/s of dense bf16.",
    )


def setting_of(row: Row) -> str:
    """A row's setting in words."""
    values = {name: f"{value:,}" if type(value) is int else value for name, value in row.setting.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def microseconds(timing: Timing) -> str:
    """A median with its spread."""
    digits = 1 if timing.median_us < 1000 else 0
    return f"{timing.median_us:,.{digits}f} us ±{timing.spread / 2:.1f} %"


def show_row(row: Row, console: Console) -> None:
    """A row in a few lines: no time of what was not shown to be equal."""
    out = console.out
    out(f"{row.name}: {setting_of(row)}", highlight=False)
    for name, check in row.checks.items():
        if check.passed:
            time = microseconds(row.timings[name]) if name in row.timings else "equal"
            out(f"    {name}: {time}", highlight=False)
        else:
            reason = check.difference or f"error {check.error:.3g}, allowed {check.limit:.3g}"
            out(f"    {name}: NOT EQUAL, so no time: {check.what}: {reason}", highlight=False)
    if not math.isnan(row.ratio):
        out(f"    floor: {figure(row.floor_us, 1)} us; ours / floor {figure(row.ratio)}", highlight=False)
    for each in row.asked:
        verdict = "met" if each.met else "NOT MET"
        out(f"    asked: {each.what}: {figure(each.value)}, at most {figure(each.limit)}: {verdict}", highlight=False)
    for note in row.notes:
        out(f"    {note}", highlight=False)


def show_floor(row: Row, console: Console) -> None:
    """Bytes of a row's floor, tensor by tensor."""
    if row.floor is None or not row.floor.parts:
        return
    console.print()
    console.out(f"Floor of {row.name}, {setting_of(row)}: {row.floor.bytes:,} bytes", highlight=False)
    print_table(
        console, ("tensor", "times", "bytes"), [(p.tensor, f"{p.count}", f"{p.bytes:,}") for p in row.floor.parts]
    )


def show(result: Result, console: Console) -> None:
    """The floors of rows that differ by their tensors, and the verdict."""
    shown = set()
    for row in result.rows:
        kind = row.floor and (row.name, tuple(part.tensor for part in row.floor.parts))
        if kind and kind not in shown:
            shown.add(kind)
            show_floor(row, console)
    console.print()
    asked = [each for row in result.rows for each in row.asked]
    met = sum(each.met for each in asked)
    if not result.is_complete:
        paragraph(console, f"Not all rows of the suite: {len(result.rows)} in {result.seconds:.0f} s.")
    failed = sum(not row.passed for row in result.rows)
    equal = "Every equality check passed" if result.passed else f"NOT EQUAL in {failed} of {len(result.rows)} rows"
    paragraph(console, f"{equal}; {met} of {len(asked)} asked figures are met.")
