"""Regret of choosing a setting by batch size, with those of always 3 steps and of the closed formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specsim.simulator.calibration.held_out import calibrate_six, closed_formula, is_doubted, speeds
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.posterior import measured
from specsim.simulator.calibration.published import Measured
from specsim.simulator.calibration.structure import Calibrated

ALWAYS = 3  # steps
MEAN_REGRET = 0.015
MOST_REGRET = 0.05


@dataclass(frozen=True, slots=True)
class Regret:
    """Throughput lost at one batch size, relative to the best measured setting."""

    table: str
    batch: int
    settings: int  # measured at this batch size
    best: str
    chosen: str
    simulated: float
    always: float | None  # with ALWAYS steps, None where they were not measured
    formula: float
    is_doubted: bool  # whether the calibration itself doubts its cells


def regrets(table: Measured, found: Calibrated | None = None) -> list[Regret]:
    """Choose at every batch size, with a calibration on the table's six cells; batches of one setting are left out.

    found: calibrate_six, where it is known.
    """
    seen = [table.cells[at] for at in table.seen]
    found = found or calibrate_six(table)
    made = []
    for size in sorted({cell.batch for cell in table.cells}):
        cells = speeds([cell for cell in table.cells if cell.batch == size])
        if len({cell.config for cell in cells}) < 2 or any(len(cell.figures) != 1 for cell in cells):
            continue
        simulated = found.predict(cells)
        formula = closed_formula(found.costs, found.posterior.values, speeds(seen), cells)
        always = next((cell for cell in cells if cell.config.num_steps == ALWAYS and cell.config.topk == 1), None)
        chosen = cells[int(np.argmax(simulated))]
        loss = _loss(cells)
        made.append(
            Regret(
                table.name,
                size,
                len(cells),
                cells[int(np.argmax(measured(cells)))].label,
                chosen.label,
                loss(chosen),
                None if always is None else loss(always),
                loss(cells[int(np.argmax(formula))]),
                is_doubted(found, seen),
            )
        )
    return made


def _loss(cells: Sequence[Observation]) -> Callable[[Observation], float]:
    """Make the relative extra time of a cell over the quickest; figures are throughputs."""
    best = float(measured(cells).max())
    return lambda cell: best / float(measured([cell])[0]) - 1


def has_choice(table: Measured) -> bool:
    """Whether a table has throughputs of several settings at a batch size."""
    return all("decode_tokens_per_s" in cell.figures for cell in table.cells)
