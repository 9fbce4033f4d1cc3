"""Measured speed-ups of published tables with simulated ones and their bands."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specsim.simulator.calibration.band import half_width, half_widths
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.posterior import measured, predict
from specsim.simulator.calibration.structure import Calibrated

TIMES = ("tpot_s", "round_s")
RATES = ("tokens_per_s", "decode_tokens_per_s")


@dataclass(frozen=True, eq=False)
class Speedups:
    """Speed-ups over the setting of fewest draft tokens at the same load, plain decoding where it was measured."""

    labels: tuple[str, ...]
    measured: np.ndarray
    predicted: np.ndarray
    widths: np.ndarray  # half-widths of the bands, on a logarithmic scale

    @property
    def errors(self) -> np.ndarray:
        """Absolute relative errors."""
        return np.abs(self.predicted / self.measured - 1)

    @property
    def covered(self) -> np.ndarray:
        """Whether each speed-up is within its band."""
        return np.abs(np.log(self.predicted / self.measured)) <= self.widths


def speedups(found: Calibrated, cells: Sequence[Observation], seen: Sequence[Observation]) -> Speedups:
    """Predict the speed-ups that a table gives, except those of two seen cells.

    Bands are those of every simulated speed-up (speedup_range): parameters in common move both sides.
    """
    known = {id(cell) for cell in seen}
    rows = [_ratio(found, *pair) for pair in _pairs(cells) if not all(id(cell) in known for cell in pair)]
    given = [cell for cell in cells if "speedup" in cell.figures and id(cell) not in known]
    if given:
        widths = half_widths(found.costs, given, found.posterior)
        labels = [cell.label for cell in given]
        rows += zip(labels, measured(given), found.predict(given), widths, strict=True)
    labels, *columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Speedups(tuple(labels), *(np.array(column) for column in columns))


def _pairs(cells: Sequence[Observation]) -> Iterator[tuple[Observation, Observation]]:
    """Pair each cell with the one of fewest draft tokens at its load."""
    loads: dict[tuple, list[Observation]] = {}
    for cell in cells:
        load = (cell.source, cell.batch, cell.prompt_tokens, cell.output_tokens, cell.filters)
        loads.setdefault(load, []).append(cell)
    for alike in loads.values():
        reference = min(alike, key=lambda cell: cell.config.num_draft_tokens)
        for cell in alike:
            if cell.config != reference.config and _figure(cell) in (*TIMES, *RATES):
                yield reference, cell


def _figure(cell: Observation) -> str:
    """Name the figure whose ratio is the speed-up, or give an empty text."""
    return next((name for name in (*RATES, *TIMES) if name in cell.figures), "")


def _ratio(found: Calibrated, reference: Observation, cell: Observation) -> tuple[str, float, float, float]:
    """Compute label, measured and predicted speed-up, and the half-width of its band."""
    name = _figure(cell)
    pair = [replace(each, figures={name: each.figures[name]}) for each in (reference, cell)]
    sign = -1 if name in TIMES else 1

    def logs(place: np.ndarray) -> np.ndarray:
        values = dict(zip(found.posterior.names, np.exp(place), strict=True))
        before, after = np.log(predict(found.costs, pair, values))
        return np.array([sign * (after - before)])

    before, after = measured(pair)
    width = float(half_width(logs, found.posterior)[0])
    return (
        f"{cell.label} over {reference.label}",
        float((after / before) ** sign),
        float(np.exp(logs(found.posterior.logs)[0])),
        width,
    )
