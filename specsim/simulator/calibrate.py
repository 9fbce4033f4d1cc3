"""Fits the few physical parameters of a cost to measured times, and says how well it does on those it did not see."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

from specsim.core.errors import InputError
from specsim.simulator.bounds import positive
from specsim.simulator.cost import CostModel
from specsim.simulator.efficiency import SHARES, Efficiency

CONFIDENCE = 0.95
_LEAST, _MOST = 1e-9, 10.0  # seconds
_STARTS = (1.0, 1 / 3, 3.0)  # times the given start: maxima in a cost make local optima
_STILL = 1e-8  # a derivative below it is none
_WIDEST = 700.0  # logarithm of a factor that is as good as infinite
_UNITS = {
    "bandwidth": "of the peak",
    "compute": "of the peak",
    "experts": "of other products",
    "overlap": "of the shorter",
}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted parameter with its 95 % interval; all of its bounds where the fitted cells do not determine it."""

    name: str
    value: float
    low: float
    high: float
    unit: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured figure beside the model's; error is relative and signed."""

    label: str
    measured: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured time and what gives it: seconds of a cost model. held_out: the fit does not see it."""

    label: str
    seconds: float
    predict: Callable[[CostModel], float]
    held_out: bool = False

    def __post_init__(self):
        positive(f"seconds of {self.label}", self.seconds)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted parameters, and every cell with its error."""

    parameters: tuple[Fitted, ...]
    cells: tuple[Cell, ...]

    @property
    def values(self) -> dict[str, float]:
        return {each.name: each.value for each in self.parameters}

    def errors(self, held_out: bool) -> np.ndarray:
        """Absolute relative errors of the cells that the fit saw, or of those it did not."""
        return np.array([abs(cell.error) for cell in self.cells if cell.held_out == held_out])


def calibrate(cost: CostModel, measurements: Sequence[Timed], free: Sequence[str]) -> tuple[CostModel, Calibration]:
    """The cost model with the fields `free` of its Efficiency fitted to the measurements that are not held out."""
    known = [field.name for field in fields(Efficiency)]
    for name in free:
        if name not in known:
            raise InputError("free", name, " or ".join(known))

    def model(values: Mapping[str, float]) -> CostModel:
        return replace(cost, efficiency=replace(cost.efficiency, **values))

    def predict(values: Mapping[str, float]) -> list[float]:
        fitted = model(values)
        return [each.predict(fitted) for each in measurements]

    calibration = fit(
        predict,
        {each.label: (each.seconds, each.held_out) for each in measurements},
        {name: (getattr(cost.efficiency, name), *_range(name)) for name in free},
    )
    return model(calibration.values), calibration


def fit(
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Mapping[str, tuple[float, bool]],
    free: Mapping[str, tuple[float, float, float]],
    unit: Callable[[str], str] = lambda name: _UNITS.get(name, "s"),
    step: float = 1e-4,
    starts: Sequence[float] = _STARTS,
    tolerance: float = 1e-8,
) -> Calibration:
    """Least squares on logarithms, so that every cell counts by its relative error.

    predict: from values of the parameters to one positive figure a cell. measured: by cell the figure, and whether it
    is held out. free: by parameter a start and the bounds. step: of the derivatives, relative to the logarithm of a
    parameter; a simulated server answers in jumps and needs a large one. starts: factors of the given start, all of
    which are tried. tolerance: of the optimum, relative. InputError where there are fewer cells than parameters.
    """
    figures = np.log([figure for figure, _ in measured.values()])
    seen = np.array([not held_out for _, held_out in measured.values()])
    if seen.sum() < len(free):
        raise InputError("free", ", ".join(free), f"at most {seen.sum()} parameters, one for each fitted cell")
    start, low, high = (np.array([bounds[at] for bounds in free.values()]) for at in range(3))
    start, low, high = np.log(np.clip(start, low, high)), np.log(low), np.log(high)

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = dict(zip(free, np.exp(logs), strict=True))
        return (np.log(predict(values)) - figures)[seen]

    limits = {"bounds": (low, high), "diff_step": step, "ftol": tolerance, "xtol": tolerance}
    tried = [np.clip(start + np.log(factor), low + 1e-6, high - 1e-6) for factor in starts]
    best = min((least_squares(residuals, each, **limits) for each in tried), key=lambda found: found.cost)
    values = np.exp(best.x)
    parameters = tuple(
        Fitted(name, float(value), max(free[name][1], value / factor), min(free[name][2], value * factor), unit(name))
        for name, value, factor in zip(free, values, _factors(best.jac, best.fun), strict=True)
    )
    predicted = predict(dict(zip(free, values, strict=True)))
    cells = tuple(
        Cell(label, figure, float(value), held_out)
        for (label, (figure, held_out)), value in zip(measured.items(), predicted, strict=True)
    )
    return Calibration(parameters, cells)


def _range(name: str) -> tuple[float, float]:
    return (1e-3, 1.0) if name in (*SHARES, "overlap") else (_LEAST, _MOST)


def _factors(jacobian: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """By parameter the factor of its interval: linear theory about the optimum, inf for what nothing determines."""
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
