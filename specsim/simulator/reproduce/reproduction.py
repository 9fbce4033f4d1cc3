"""Reproduction of a published table: fit of physical parameters, pairs of figures, targets."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

from specsim.core.errors import InputError, require_choice
from specsim.simulator.bounds import positive
from specsim.simulator.cost import CostModel
from specsim.simulator.efficiency import SHARES, Efficiency

TABLES = Path(__file__).parents[1] / "tables"


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table, by heading."""
    with (TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


CONFIDENCE = 0.95
_LEAST = 1e-9  # seconds
_MOST = 10.0
_STARTS = (1.0, 1 / 3, 3.0)  # times the given start: maxima in a cost make local optima
_STILL = 1e-8  # smaller derivatives count as 0
_WIDEST = 700.0  # logarithm of a factor that counts as infinite
_UNITS = {
    "bandwidth": "of the peak",
    "compute": "of the peak",
    "experts": "of other products",
    "mxfp4_experts": "of other products",
    "overlap": "of the shorter",
}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted parameter."""

    name: str  # name of the parameter
    value: float  # fitted value, in the unit
    low: float  # 95 % interval; the bounds of the fit where the fitted cells do not determine the parameter
    high: float  # upper end of the 95 % interval, or of the fit's bounds
    unit: str  # unit; empty for a ratio


@dataclass(frozen=True, slots=True)
class ReproducedCell:
    """A measured figure and the model's."""

    label: str
    measured: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured time, and a function for the same time under a cost model."""

    label: str
    seconds: float
    predict: Callable[[CostModel], float]
    held_out: bool = False  # not used by the fit

    def __post_init__(self) -> None:
        positive(f"seconds of {self.label}", self.seconds)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted parameters, and every cell, fitted or held out."""

    parameters: tuple[Fitted, ...]
    cells: tuple[ReproducedCell, ...]

    @property
    def values(self) -> dict[str, float]:
        return {parameter.name: parameter.value for parameter in self.parameters}

    def errors(self, held_out: bool) -> np.ndarray:
        """Absolute relative errors of the fitted cells, or of the held-out ones."""
        return np.array([abs(cell.error) for cell in self.cells if cell.held_out == held_out])


class Observed(NamedTuple):
    """A positive figure for a fit."""

    value: float
    held_out: bool = False


class Free(NamedTuple):
    """Start and bounds of a fitted parameter."""

    start: float
    low: float
    high: float


def calibrate(cost: CostModel, measurements: Sequence[Timed], free: Sequence[str]) -> tuple[CostModel, Calibration]:
    """Fit the fields `free` of a cost model's Efficiency to the measurements that are not held out."""
    names = [field.name for field in fields(Efficiency)]
    for name in free:
        require_choice("free", name, names)

    def model(values: Mapping[str, float]) -> CostModel:
        return replace(cost, efficiency=replace(cost.efficiency, **values))

    def predict(values: Mapping[str, float]) -> list[float]:
        fitted = model(values)
        return [timed.predict(fitted) for timed in measurements]

    calibration = fit(
        predict,
        {timed.label: Observed(timed.seconds, timed.held_out) for timed in measurements},
        {name: _free(name, getattr(cost.efficiency, name)) for name in free},
    )
    return model(calibration.values), calibration


def fit(
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Mapping[str, Observed],
    free: Mapping[str, Free],
    unit: Callable[[str], str] = lambda name: _UNITS.get(name, "s"),
    step: float = 1e-4,
    starts: Sequence[float] = _STARTS,
    tolerance: float = 1e-8,
) -> Calibration:
    """Fit by least squares on logarithms, so that cells count by relative errors.

    predict: from values of the parameters to one positive figure per cell. step: of the derivatives, relative to the
    logarithm of a parameter; a simulated server answers in jumps and needs a large one. starts: factors of the given
    start, all tried. tolerance: of the optimum, relative. InputError where there are fewer cells than parameters.
    """
    figures = np.log([observed.value for observed in measured.values()])
    seen = np.array([not observed.held_out for observed in measured.values()])
    if seen.sum() < len(free):
        raise InputError("free", ", ".join(free), f"at most {seen.sum()} parameters, one for each fitted cell")
    low = np.log(np.array([parameter.low for parameter in free.values()]))
    high = np.log(np.array([parameter.high for parameter in free.values()]))
    start = np.log(np.array([np.clip(*parameter) for parameter in free.values()]))

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = dict(zip(free, np.exp(logs), strict=True))
        return (np.log(predict(values)) - figures)[seen]

    limits = {"bounds": (low, high), "diff_step": step, "ftol": tolerance, "xtol": tolerance}
    tried = [np.clip(start + np.log(factor), low + 1e-6, high - 1e-6) for factor in starts]
    best = min((least_squares(residuals, logs, **limits) for logs in tried), key=lambda result: result.cost)
    values = np.exp(best.x)
    parameters = tuple(
        Fitted(
            name, float(value), max(free[name].low, value / factor), min(free[name].high, value * factor), unit(name)
        )
        for name, value, factor in zip(free, values, _factors(best.jac, best.fun), strict=True)
    )
    predicted = predict(dict(zip(free, values, strict=True)))
    cells = tuple(
        ReproducedCell(label, observed.value, float(value), observed.held_out)
        for (label, observed), value in zip(measured.items(), predicted, strict=True)
    )
    return Calibration(parameters, cells)


def _free(name: str, start: float) -> Free:
    return Free(start, 1e-3, 1.0) if name in (*SHARES, "overlap") else Free(start, _LEAST, _MOST)


def _factors(jacobian: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """Compute the factor of every parameter's interval: linear theory about the optimum, inf if undetermined."""
    freedom = len(residuals) - jacobian.shape[1]
    factors = np.full(jacobian.shape[1], np.inf)
    moves = np.abs(jacobian).max(axis=0) > _STILL
    inner = jacobian[:, moves]
    if freedom < 1 or not moves.any() or np.linalg.cond(inner) > 1 / _STILL:
        return factors
    variance = (residuals @ residuals) / freedom * np.linalg.inv(inner.T @ inner).diagonal()
    half = student.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance)
    factors[moves] = np.exp(np.minimum(half, _WIDEST))
    return factors


Role = Literal["fitted", "held out", "computed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure and the simulated one."""

    setting: str  # setting of the figure
    quantity: str  # name and unit of the figure
    published: float  # published value
    simulated: float  # simulated value
    role: Role = "computed"  # fitted: the fit saw it; held out: it did not; computed: nothing was fitted
    digits: int = 2  # published decimals

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.simulated / self.published - 1

    def cells(self) -> tuple[str, ...]:
        """Make the cells of a table row: setting, figure, published, simulated, error, role."""
        values = (f"{value:.{self.digits}f}" for value in (self.published, self.simulated))
        error = f"{self.error:+.1%}"
        return (self.setting, self.quantity, *values, "0.0%" if error[1:] == "0.0%" else error, self.role)

    @property
    def is_as_printed(self) -> bool:
        """Whether both are equal in the published digits."""
        return round(self.simulated + 1e-9, self.digits) == round(self.published, self.digits)


@dataclass(frozen=True, slots=True)
class AccuracyTarget:
    """A required accuracy of a reproduction."""

    name: str  # the accuracy, in words
    value: str  # the figure, and the least or most allowed
    is_reached: bool  # whether it is reached


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A table and its reproduction."""

    name: str
    source: str  # publication of the table
    method: str  # includes everything that was fixed before any fit
    figures: tuple[Figure, ...]
    parameters: tuple[Fitted, ...] = ()  # fitted parameters
    targets: tuple[AccuracyTarget, ...] = ()  # accuracies to reach
    notes: tuple[str, ...] = ()  # conclusions

    def errors(self, role: Role) -> np.ndarray:
        """Absolute relative errors of the figures in this role."""
        return np.array([abs(figure.error) for figure in self.figures if figure.role == role])

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "table": self.name,
            "source": self.source,
            "method": self.method,
            "figures": [asdict(figure) | {"error": figure.error} for figure in self.figures],
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "targets": [asdict(target) for target in self.targets],
            "notes": list(self.notes),
        }


def figures_of(calibration: Calibration, quantity: str, digits: int = 2, scale: float = 1.0) -> tuple[Figure, ...]:
    """Make figures of the cells of a calibration, times `scale`."""
    return tuple(
        Figure(
            cell.label,
            quantity,
            cell.measured * scale,
            cell.predicted * scale,
            "held out" if cell.held_out else "fitted",
            digits,
        )
        for cell in calibration.cells
    )


def parameter_cells(fitted: Fitted) -> tuple[str, ...]:
    """Make the cells of a table row: parameter, value, from, to, unit; seconds as microseconds."""
    scale, unit = (1e6, "µs") if fitted.unit == "s" else (1, fitted.unit)
    values = (f"{scale * value:.3g}" for value in (fitted.value, fitted.low, fitted.high))
    return (fitted.name, *values, unit)


def at_most(name: str, errors: Iterable[float], limit: float) -> AccuracyTarget:
    """Make the target that no error exceeds a limit."""
    worst = max(errors)
    return AccuracyTarget(name, f"{worst:.2%} at worst, target {limit:.1%}", bool(worst <= limit))
