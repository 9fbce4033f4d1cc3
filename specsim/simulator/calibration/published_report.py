"""Held-out errors of all published tables: six cells, a left-out table, bands, and the choice of steps by batch."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from specsim.core.display import heading, paragraph, print_table
from specsim.simulator.calibration.held_out import (
    LEAST_CELLS,
    MEAN_ERROR,
    MOST_ERROR,
    HeldOut,
    LeftOut,
    Speedups,
    calibrate_six,
    closed_formula,
    is_doubted,
    leave_one_table_out,
    six_cells,
    speeds,
)
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.posterior import CONFIDENCE, measured
from specsim.simulator.calibration.published import CELLS, PublishedTable, tables
from specsim.simulator.calibration.structure import Calibrated

ALWAYS = 3  # steps
MEAN_REGRET = 0.015
MOST_REGRET = 0.05


@dataclass(frozen=True, slots=True)
class Regret:
    """Throughput lost at one batch size, relative to the best measured setting."""

    table: str  # name of the table
    batch: int  # batch size
    settings: int  # measured at this batch size
    best: str  # setting that was measured to be best
    chosen: str  # setting that the calibrated simulator chose
    simulated: float  # throughput lost by the simulator's choice, relative
    always: float | None  # with ALWAYS steps, None where they were not measured
    formula: float  # throughput lost by the closed formula's choice
    is_doubted: bool  # whether the calibration itself doubts its cells


def regrets(table: PublishedTable, calibrated: Calibrated | None = None) -> list[Regret]:
    """Choose at every batch size, with a calibration on the table's six cells; batches of one setting are left out.

    calibrated: calibrate_six, where it is known.
    """
    seen = [table.cells[at] for at in table.seen]
    calibrated = calibrated or calibrate_six(table)
    by_batch = []
    for size in sorted({cell.batch for cell in table.cells}):
        cells = speeds([cell for cell in table.cells if cell.batch == size])
        if len({cell.config for cell in cells}) < 2 or any(len(cell.figures) != 1 for cell in cells):
            continue
        simulated = calibrated.predict(cells)
        formula = closed_formula(calibrated.costs, calibrated.posterior.values, speeds(seen), cells)
        always = next((cell for cell in cells if cell.config.num_steps == ALWAYS and cell.config.topk == 1), None)
        chosen = cells[int(np.argmax(simulated))]
        loss = _loss(cells)
        by_batch.append(
            Regret(
                table.name,
                size,
                len(cells),
                cells[int(np.argmax(measured(cells)))].label,
                chosen.label,
                loss(chosen),
                None if always is None else loss(always),
                loss(cells[int(np.argmax(formula))]),
                is_doubted(calibrated, seen),
            )
        )
    return by_batch


def _loss(cells: Sequence[Observation]) -> Callable[[Observation], float]:
    """Make the relative extra time of a cell over the quickest; figures are throughputs."""
    best = float(measured(cells).max())
    return lambda cell: best / float(measured([cell])[0]) - 1


def has_choice(table: PublishedTable) -> bool:
    """Whether a table has throughputs of several settings at a batch size."""
    return all("decode_tokens_per_s" in cell.figures for cell in table.cells)


TABLE_MEAN = 0.12  # of a table that is left out
TABLE_MOST = 0.30
COVERAGE = (0.80, 0.98)
MOST_WIDTH = 0.15
ERRORS = ("before", "before, worst", "mean", "worst", "target", "formula", "formula, worst", "in band", "half-width")
SIX = ("table", "held out", *ERRORS)
LEFT = ("table", "from", *ERRORS)
SPEEDUPS = ("table", "calibrated on", "speed-ups", "mean", "worst", "in band", "half-width")
CHOICE = ("table", "batch", "settings", "best measured", "chosen", "regret", "always 3", "formula")


@dataclass(frozen=True, eq=False)
class PublishedReport:
    """Errors on cells that no fit has seen."""

    tables: Sequence[PublishedTable]
    six: Sequence[HeldOut]
    left_out: Sequence[LeftOut]
    choices: Sequence[Regret]

    @property
    def bands(self) -> tuple[float, float]:
        """Share of all held-out figures within their bands, and the median half-width as a factor less 1."""
        return _coverage([*self.six, *(table.result for table in self.left_out)])

    @property
    def speedup_bands(self) -> tuple[float, float]:
        """Share of all measured speed-ups within their bands, and the median half-width as a factor less 1."""
        return _coverage([table.speedups for table in (*self.six, *(table.result for table in self.left_out))])

    @property
    def mean_regrets(self) -> dict[str, tuple[float, float]]:
        """Mean and worst regret of the simulated choice, of always 3 steps where measured, and of the formula.

        Tables whose calibration doubts its cells do not count.
        """
        counted = [choice for choice in self.choices if not choice.is_doubted]
        always = [choice.always for choice in counted if choice.always is not None]
        named = {
            "simulated": [choice.simulated for choice in counted],
            "always 3 steps": always,
            "closed formula": [choice.formula for choice in counted],
        }
        return {name: (float(np.mean(values)), float(np.max(values))) for name, values in named.items() if values}

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        covered, width = self.bands
        inside, wide = self.speedup_bands
        return {
            "six_cells": [_json(table) for table in self.six],
            "left_out_tables": [
                _json(table.result) | {"engine": table.engine, "others": list(table.others)} for table in self.left_out
            ],
            "bands": {"confidence": CONFIDENCE, "coverage": covered, "median_half_width": width},
            "speedup_bands": {"confidence": CONFIDENCE, "coverage": inside, "median_half_width": wide},
            "choices": [asdict(choice) for choice in self.choices],
            "regrets": {name: {"mean": mean, "worst": worst} for name, (mean, worst) in self.mean_regrets.items()},
        }


def report(published: Sequence[PublishedTable] | None = None) -> PublishedReport:
    """Calibrate, hold out and choose on all tables of the package, or on these."""
    published = tables() if published is None else published
    calibrated = [(table, calibrate_six(table)) for table in published]
    six = [held_out for held_out in (six_cells(*pair) for pair in calibrated) if len(held_out.measured)]
    choices = [regret for table, fit in calibrated if has_choice(table) for regret in regrets(table, fit)]
    return PublishedReport(published, six, leave_one_table_out(published), choices)


def six_rows(published: PublishedReport) -> list[tuple[str, ...]]:
    """Make the rows of SIX."""
    return [(table.table, str(len(table.measured)), *_errors(table, table.is_within_target)) for table in published.six]


def left_rows(published: PublishedReport) -> list[tuple[str, ...]]:
    """Make the rows of LEFT."""
    rows = []
    for table in published.left_out:
        errors = table.result.errors
        reached = bool(errors.mean() <= TABLE_MEAN and errors.max() <= TABLE_MOST)
        rows.append((table.table, "; ".join(table.others), *_errors(table.result, reached)))
    return rows


def speedup_rows(published: PublishedReport) -> list[tuple[str, ...]]:
    """Make the rows of SPEEDUPS."""
    every = [(table, f"{CELLS} cells") for table in published.six]
    every += [(table.result, "; ".join(table.others)) for table in published.left_out]
    return [
        (
            table.table,
            source,
            str(len(table.speedups.measured)),
            f"{table.speedups.errors.mean():.1%}",
            f"{table.speedups.errors.max():.1%}",
            f"{table.speedups.covered.mean():.0%}",
            f"{np.expm1(np.median(table.speedups.widths)):.0%}",
        )
        for table, source in every
        if len(table.speedups.measured)
    ]


def choice_rows(published: PublishedReport) -> list[tuple[str, ...]]:
    """Make the rows of CHOICE."""
    return [
        (
            choice.table,
            str(choice.batch),
            str(choice.settings),
            choice.best,
            choice.chosen,
            f"{choice.simulated:.1%}",
            "-" if choice.always is None else f"{choice.always:.1%}",
            f"{choice.formula:.1%}",
        )
        for choice in published.choices
    ]


def sentences(published: PublishedReport) -> list[str]:
    """Say the rules and the figures over all tables."""
    covered, width = published.bands
    inside, wide = published.speedup_bands
    every = [choice.simulated for choice in published.choices]
    all_regrets = f"{np.mean(every):.1%} and {np.max(every):.1%}" if every else "the same"
    doubted = ", ".join(dict.fromkeys(choice.table for choice in published.choices if choice.is_doubted)) or "no table"
    regret = "; ".join(
        f"{name} {mean:.1%} on average, {worst:.1%} at worst" for name, (mean, worst) in published.mean_regrets.items()
    )
    return [
        f"Calibrated on {CELLS} cells, selected by their settings alone: fewest and most draft tokens at the smallest, "
        f"the middle and the largest batch size. Errors are those of throughput, time per token, speed-up or round of "
        f"the other cells. Target, for published tables of at least {LEAST_CELLS} cells: {MEAN_ERROR:.0%} on average, "
        f"{MOST_ERROR:.0%} at worst. Before: with the assumed parameters that every fit begins with, uncalibrated. "
        "Formula: accept length / (1 + K c) with a scale fitted to the same cells.",
        f"A table predicted from the others of its engine: target {TABLE_MEAN:.0%} on average, {TABLE_MOST:.0%} at "
        "worst.",
        f"{CONFIDENCE:.0%} bands hold {covered:.0%} of all held-out figures above (target {COVERAGE[0]:.0%} to "
        f"{COVERAGE[1]:.0%}); their median half-width is {width:.0%} (target {MOST_WIDTH:.0%}).",
        "Speed-ups over plain decoding at the same load, or over the fewest draft tokens where it was not measured, "
        "with at least one side that no fit has seen; parameters that both sides share move them together. "
        f"{CONFIDENCE:.0%} bands hold {inside:.0%} of the speed-ups (target {COVERAGE[0]:.0%} to {COVERAGE[1]:.0%}); "
        f"their median half-width is {wide:.0%} (target {MOST_WIDTH:.0%}).",
        f"Regret of the choice by batch size, after a calibration on {CELLS} cells: {regret} (target "
        f"{MEAN_REGRET:.1%} and {MOST_REGRET:.0%}). Not counted: {doubted}, whose calibration has doubts; "
        f"with all tables {all_regrets}.",
    ]


def show(published: PublishedReport, console: Console) -> None:
    """Print all tables of errors, and the cells that were fitted."""
    six, left_out, bands, ratios, choice = sentences(published)
    heading(console, f"calibrated on {CELLS} cells")
    print_table(console, SIX, six_rows(published))
    paragraph(console, six)
    heading(console, "fitted cells")
    for table in published.six:
        paragraph(console, f"{table.table}: {'; '.join(table.seen)}")
    heading(console, "a table left out")
    print_table(console, LEFT, left_rows(published))
    for text in (left_out, bands):
        paragraph(console, text)
    heading(console, "speed-ups")
    print_table(console, SPEEDUPS, speedup_rows(published))
    paragraph(console, ratios)
    heading(console, "choice by batch size")
    print_table(console, CHOICE, choice_rows(published))
    paragraph(console, choice)
    for table in published.tables:
        if table.note:
            paragraph(console, f"{table.name}: {table.note}")


def _coverage(every: Sequence[HeldOut] | Sequence[Speedups]) -> tuple[float, float]:
    """Compute the share of figures within bands, and the median half-width as a factor less 1."""
    covered = np.concatenate([table.covered for table in every])
    widths = np.concatenate([table.widths for table in every])
    return float(covered.mean()), float(np.expm1(np.median(widths)))


def _errors(result: HeldOut, reached: bool | None) -> tuple[str, ...]:
    target = "no target" if reached is None else "reached" if reached else "not reached"
    target += ", doubted" if result.is_doubted else ""
    formula = result.formula_errors
    return (
        f"{result.errors_before.mean():.1%}",
        f"{result.errors_before.max():.1%}",
        f"{result.errors.mean():.1%}",
        f"{result.errors.max():.1%}",
        target,
        f"{formula.mean():.1%}",
        f"{formula.max():.1%}",
        f"{result.covered.mean():.0%}",
        f"{np.expm1(np.median(result.widths)):.0%}",
    )


def _json(result: HeldOut) -> dict[str, Any]:
    cells = zip(result.labels, result.measured.tolist(), result.predicted.tolist(), result.widths.tolist(), strict=True)
    return {
        "table": result.table,
        "fitted_cells": list(result.seen),
        "mean_error": float(result.errors.mean()),
        "worst_error": float(result.errors.max()),
        "is_within_target": result.is_within_target,
        "is_doubted": result.is_doubted,
        "uncalibrated_mean_error": float(result.errors_before.mean()),
        "uncalibrated_worst_error": float(result.errors_before.max()),
        "formula_mean_error": float(result.formula_errors.mean()),
        "formula_worst_error": float(result.formula_errors.max()),
        "coverage": float(result.covered.mean()),
        "figures": [
            {"figure": label, "measured": value, "predicted": predicted, "half_width": float(np.expm1(width))}
            for label, value, predicted, width in cells
        ],
    }
