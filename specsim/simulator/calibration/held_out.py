"""Errors of calibrated servers on cells that the calibration has not seen, with those of the closed formula."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specsim.simulator.calibration.observation import AssumedAcceptance, Costs, Observation
from specsim.simulator.calibration.posterior import half_width, half_widths, measured, on_another_gpu, predict
from specsim.simulator.calibration.published import PublishedTable, shared_priors, tables_of_shares, together
from specsim.simulator.calibration.structure import Calibrated, calibrate, doubts
from specsim.simulator.cost import CostModel

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


def speedups(calibrated: Calibrated, cells: Sequence[Observation], seen: Sequence[Observation]) -> Speedups:
    """Predict the speed-ups that a table gives, except those of two seen cells.

    Bands are those of every simulated speed-up (speedup_range): parameters in common move both sides.
    """
    seen_ids = {id(cell) for cell in seen}
    rows = [_ratio(calibrated, *pair) for pair in _pairs(cells) if not all(id(cell) in seen_ids for cell in pair)]
    speedup_cells = [cell for cell in cells if "speedup" in cell.figures and id(cell) not in seen_ids]
    if speedup_cells:
        widths = half_widths(calibrated.costs, speedup_cells, calibrated.posterior)
        labels = [cell.label for cell in speedup_cells]
        rows += zip(labels, measured(speedup_cells), calibrated.predict(speedup_cells), widths, strict=True)
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


def _ratio(calibrated: Calibrated, reference: Observation, cell: Observation) -> tuple[str, float, float, float]:
    """Compute label, measured and predicted speed-up, and the half-width of its band."""
    name = _figure(cell)
    pair = [replace(side, figures={name: side.figures[name]}) for side in (reference, cell)]
    sign = -1 if name in TIMES else 1

    def logs(parameter_logs: np.ndarray) -> np.ndarray:
        values = dict(zip(calibrated.posterior.names, np.exp(parameter_logs), strict=True))
        before, after = np.log(predict(calibrated.costs, pair, values))
        return np.array([sign * (after - before)])

    before, after = measured(pair)
    width = float(half_width(logs, calibrated.posterior)[0])
    return (
        f"{cell.label} over {reference.label}",
        float((after / before) ** sign),
        float(np.exp(logs(calibrated.posterior.logs)[0])),
        width,
    )


LEAST_CELLS = 15  # of a published table with a target
MEAN_ERROR = 0.04
MOST_ERROR = 0.12
SPEEDS = ("tokens_per_s", "decode_tokens_per_s", "tpot_s", "round_s", "speedup")


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Predictions of held-out figures: throughput, time per token, speed-up or time of a round."""

    table: str
    cells: int  # of the published table, all of its servers
    seen: tuple[str, ...]  # labels of the fitted cells
    labels: tuple[str, ...]  # of the figures
    measured: np.ndarray
    predicted: np.ndarray
    widths: np.ndarray  # half-widths of the bands, on a logarithmic scale
    is_doubted: bool  # whether the calibration itself doubts its cells (plausible.doubts)
    before: np.ndarray  # predictions with assumed parameters, without any calibration
    formula: np.ndarray  # predictions of the closed formula with a scale fitted to the same cells
    speedups: Speedups  # of the table, with at least one held-out side

    @property
    def errors(self) -> np.ndarray:
        """Absolute relative errors."""
        return np.abs(self.predicted / self.measured - 1)

    @property
    def errors_before(self) -> np.ndarray:
        """Absolute relative errors without a calibration."""
        return np.abs(self.before / self.measured - 1)

    @property
    def formula_errors(self) -> np.ndarray:
        """Absolute relative errors of the closed formula."""
        return np.abs(self.formula / self.measured - 1)

    @property
    def covered(self) -> np.ndarray:
        """Whether each figure is within its band."""
        return np.abs(np.log(self.predicted / self.measured)) <= self.widths

    @property
    def is_within_target(self) -> bool | None:
        """Whether mean and worst error are within their limits; None for tables of fewer than LEAST_CELLS cells."""
        if self.cells < LEAST_CELLS:
            return None
        return bool(self.errors.mean() <= MEAN_ERROR and self.errors.max() <= MOST_ERROR)


def calibrate_six(table: PublishedTable) -> Calibrated:
    """Calibrate on the cells that the rule selects."""
    return calibrate(table.costs, [table.cells[at] for at in table.seen], table.structures)


def six_cells(table: PublishedTable, calibrated: Calibrated | None = None) -> HeldOut:
    """Calibrate on the cells that the rule selects, and predict the others.

    calibrated: calibrate_six, where it is known.
    """
    seen = [table.cells[at] for at in table.seen]
    rest = [cell for at, cell in enumerate(table.cells) if at not in table.seen]
    return _held_out(table, calibrated or calibrate_six(table), seen, rest)


def _held_out(
    table: PublishedTable, calibrated: Calibrated, seen: Sequence[Observation], rest: Sequence[Observation]
) -> HeldOut:
    counted = speeds(rest)
    formula = closed_formula({**table.costs, **calibrated.costs}, calibrated.posterior.values, speeds(seen), counted)
    return HeldOut(
        table.name,
        table.published_cells,
        tuple(cell.label for cell in seen),
        tuple(f"{cell.label}, {name}" for cell in counted for name in cell.figures),
        measured(counted),
        calibrated.predict(counted),
        half_widths(calibrated.costs, counted, calibrated.posterior),
        is_doubted(calibrated, seen),
        predict(table.structures[0].costs(table.costs), counted, {}),
        formula,
        speedups(calibrated, table.cells, seen),
    )


def is_doubted(calibrated: Calibrated, seen: Sequence[Observation]) -> bool:
    """Whether a calibration doubts the cells it was fitted to."""
    speed_cells = speeds(seen)
    return bool(doubts(calibrated.posterior, calibrated.predict(speed_cells) / measured(speed_cells) - 1, {}))


def speeds(cells: Sequence[Observation]) -> list[Observation]:
    """Keep the figures of speed of each cell."""
    figures_by_cell = [{name: value for name, value in cell.figures.items() if name in SPEEDS} for cell in cells]
    return [replace(cell, figures=figures) for cell, figures in zip(cells, figures_by_cell, strict=True)]


def cost_ratio(cost: CostModel) -> float:
    """Compute the weights of a drafter's forward over those of a target's forward: the formula's c."""
    if cost.drafter is None:
        return 0.0
    drafter, target = (model.active_parameters for model in (cost.drafter.model, cost.model))
    return drafter / target


def closed_formula(
    costs: Costs, values: Mapping[str, float], seen: Sequence[Observation], rest: Sequence[Observation]
) -> np.ndarray:
    """Predict with accept length / (1 + K c) alone, as if verifying were free, times one scale for each quantity.

    The scale is the geometric mean over the seen cells; throughput grows with the batch, times of rounds do not.
    """

    def raw(cell: Observation, name: str) -> float:
        steps = cell.config.num_steps
        ratio = cost_ratio(costs[cell.source]) if steps else 0.0
        acceptance = AssumedAcceptance(values.get("accept_rate", 0.7), values.get("accept_decay", 1.0))
        round_ = 1 + steps * ratio
        gain = (cell.accept_length or acceptance.length(steps)) / round_
        speed = {"tpot_s": 1 / gain, "round_s": round_, "speedup": gain}
        return speed.get(name, cell.batch * gain)

    logs: dict[str, list[float]] = {}
    for cell in seen:
        for name, value in cell.figures.items():
            logs.setdefault(name, []).append(np.log(value / raw(cell, name)))
    scales = {name: float(np.exp(np.mean(ratios))) for name, ratios in logs.items()} | {"speedup": 1.0}
    return np.array([scales[name] * raw(cell, name) for cell in rest for name in cell.figures])


def _transferred(calibrated: Calibrated, table: PublishedTable) -> Calibrated:
    """Move a calibration to the servers of another table, and to their GPU."""
    gpus = {cost.hardware.name for cost in calibrated.costs.values()}
    posterior = calibrated.posterior.with_priors()
    if not gpus.intersection(cost.hardware.name for cost in table.costs.values()):
        posterior = on_another_gpu(posterior)
    return replace(
        calibrated, costs={**calibrated.structure.costs(table.costs), **calibrated.costs}, posterior=posterior
    )


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Predictions of a table by a profile that was fitted to the other tables of its engine."""

    table: str
    engine: str
    others: tuple[str, ...]  # tables that were fitted, those of the shares of peaks included
    result: HeldOut


def leave_one_table_out(tables: Sequence[PublishedTable]) -> list[LeftOut]:
    """Predict every table from the others of its engine; engines with a single table are left out."""
    results = []
    priors = {}  # by the tables that they come from, as the tables of an engine share them
    for table in tables:
        others = [other for other in tables if other.engine == table.engine and other is not table]
        if not others:
            continue
        share_tables = tables_of_shares(others, [other for other in tables if other is not table])
        source = tuple(other.name for other in share_tables)
        if source not in priors:
            priors[source] = shared_priors(share_tables)
        fitted = _transferred(together(others, priors[source]), table)
        result = _held_out(table, fitted, [cell for other in others for cell in other.cells], table.cells)
        shares = [other for other in tables if other.engine == table.shares_of]
        results.append(LeftOut(table.name, table.engine, tuple(other.name for other in (*others, *shares)), result))
    return results
