"""Reproduction of a published table: pairs of figures, fitted parameters, targets."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from specsim.simulator.calibrate import Calibration, Fitted
from specsim.simulator.fitted import FittedServer

Role = Literal["fitted", "held out", "computed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure and the simulated one."""

    setting: str
    quantity: str
    published: float
    simulated: float
    role: Role = "computed"
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
class Target:
    """A required accuracy of a reproduction."""

    name: str
    value: str  # the figure, and the least or most allowed
    is_reached: bool


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A table and its reproduction."""

    name: str
    source: str
    method: str  # includes everything that was fixed before any fit
    figures: tuple[Figure, ...]
    parameters: tuple[Fitted, ...] = ()
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()  # conclusions
    servers: tuple[FittedServer, ...] = ()  # with fitted parameters

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
            "parameters": [asdict(each) for each in self.parameters],
            "targets": [asdict(each) for each in self.targets],
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


def at_most(name: str, errors: Iterable[float], limit: float) -> Target:
    """Make the target that no error exceeds a limit."""
    worst = max(errors)
    return Target(name, f"{worst:.2%} at worst, target {limit:.1%}", bool(worst <= limit))
