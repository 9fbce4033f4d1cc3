"""A server calibrated on benchmark files: its profile, every cell, its doubts, and their printed form."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specsim import __version__
from specsim.core.display import figure, heading, paragraph, print_table
from specsim.core.errors import require
from specsim.core.kinds import DEFAULT
from specsim.simulator.calibration.benchmark_file import BenchmarkSource, Context, read
from specsim.simulator.calibration.observation import PRIORS, Observation
from specsim.simulator.calibration.posterior import CONFIDENCE, DETERMINED, measured
from specsim.simulator.calibration.profile import Profile, ServerStructure, chain_acceptance
from specsim.simulator.calibration.structure import MARGIN, Calibrated, calibrate, doubts, left_out
from specsim.simulator.cost import CostModel
from specsim.simulator.model import same_model, shape_of

UNITS = {"tokens_per_s": "tok/s", "decode_tokens_per_s": "tok/s, decoding", "tpot_s": "TPOT, ms", "ttft_s": "TTFT, ms"}


@dataclass(frozen=True, slots=True)
class FittedCell:
    """A figure that the fit saw."""

    label: str  # setting and load
    quantity: str  # figure: tokens_per_s, decode_tokens_per_s, tpot_s or ttft_s
    measured: float  # measured value
    fitted: float  # value under the fitted parameters

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.fitted / self.measured - 1


@dataclass(frozen=True, slots=True, eq=False)
class ServerFit:
    """A calibration and what it rests on."""

    profile: Profile
    cells: tuple[FittedCell, ...]
    left_out: Mapping[int, float]  # worst error of a batch size under a fit to the others
    left_out_mean: float | None  # mean error over all of these figures
    tried: Mapping[ServerStructure, float]
    doubts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "profile": self.profile.to_json(),
            "cells": [asdict(cell) | {"error": cell.error} for cell in self.cells],
            "left_out": [{"batch": size, "worst_error": error} for size, error in self.left_out.items()],
            "left_out_mean_error": self.left_out_mean,
            "structures": [
                {"schedule": structure.schedule, "graphs": structure.graphs, "objective": value}
                for structure, value in self.tried.items()
            ],
            "doubts": list(self.doubts),
        }


def read_files(paths: Sequence[Path], context: Context) -> tuple[list[BenchmarkSource], list[Observation]]:
    """Read the cells of all files."""
    require(paths, "file", "none", "at least one file of a benchmark")
    sources = []
    cells: list[Observation] = []
    for path in paths:
        source, observations = read(path, context)
        sources.append(source)
        cells += observations
    return sources, cells


def fit_server(
    cost: CostModel, cells: Sequence[Observation], sources: Sequence[BenchmarkSource], name: str, drafter: str = DEFAULT
) -> ServerFit:
    """Calibrate a server; `name` is the profile's, `drafter` the drafter's architecture."""
    calibrated = calibrate({"": cost}, cells)
    figures = [(cell.label, name) for cell in cells for name in cell.figures]
    pairs = zip(figures, measured(cells).tolist(), calibrated.predict(cells).tolist(), strict=True)
    fitted = tuple(FittedCell(*figure, value, predicted) for figure, value, predicted in pairs)
    outside = left_out(calibrated.costs, cells)
    speeds = np.array([cell.error for cell in fitted if cell.quantity != "ttft_s"] or [0.0])
    worst = {size: float(np.abs(errors).max()) for size, errors in outside.items()}
    every = np.concatenate(list(outside.values())) if outside else None
    acceptance = chain_acceptance(cost.model.name, drafter, cells, calibrated.posterior)
    made_of = provenance(cost, sources, len(cells), calibrated)
    return ServerFit(
        Profile(name, calibrated.posterior, calibrated.structure, made_of, acceptance),
        fitted,
        worst,
        None if every is None else float(np.abs(every).mean()),
        calibrated.tried,
        (*other_models(cost.model.name, sources), *doubts(calibrated.posterior, speeds, outside)),
    )


def other_models(name: str, sources: Sequence[BenchmarkSource]) -> list[str]:
    """Say which files name another model than the calibrated one, unless it is one of the same shape.

    InputError where that model is known to have another shape.
    """
    says = []
    for source in sources:
        if not source.model or same_model(name, source.model):
            continue
        shape = shape_of(source.model)
        if shape == name:
            continue
        allowed = f"results of {name}: {source.path} is of {source.model}, so give --model {shape}"
        require(shape is None, "file", source.path, allowed)
        says.append(f"{source.path} names the model {source.model}, and the profile is of {name} (--model)")
    return says


def provenance(
    cost: CostModel, sources: Sequence[BenchmarkSource], cells: int, calibrated: Calibrated
) -> dict[str, Any]:
    """Record what a profile was made of."""
    return {
        "tool": f"specsim calibrate {__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "model": cost.model.name,
        "hardware": cost.hardware.name,
        "tensor_parallel": cost.tensor_parallel,
        "files": [asdict(source) for source in sources],
        "cells": cells,
        "determined": list(calibrated.posterior.determined),
    }


_STEPS = 6  # steps of fitted acceptance that are shown


def show(fit: ServerFit, console: Console) -> None:
    """Print the doubts first, then cells, parameters, and errors of batches that were left out."""
    made_of = fit.profile.provenance
    gpus = f"{made_of['tensor_parallel']} × {made_of['hardware']}"
    files = ", ".join(f"{file['path']} ({file['tool']}, {file['cells']} cells)" for file in made_of["files"])
    paragraph(console, f"{made_of['model']} on {gpus}, from {files}")
    if fit.doubts:
        heading(console, "doubts")
        for doubt in fit.doubts:
            paragraph(console, doubt)
    heading(console, "cells")
    print_table(console, ("cell", "figure", "measured", "fitted", "error"), [_cell(cell) for cell in fit.cells])
    heading(console, "parameters")
    print_table(console, ("parameter", "value", "from", "to", "unit", ""), _parameters(fit))
    console.print()
    paragraph(console, _explained(fit))
    values = fit.profile.posterior.values
    if "accept_rate" in values:
        rates = np.cumprod(values["accept_rate"] * values["accept_decay"] ** np.arange(_STEPS))
        printed_rates = ",".join(f"{rate:.2f}" for rate in rates)
        paragraph(console, f"Accept lengths that were not measured are fitted, as of --accept-rates {printed_rates}.")
    if fit.left_out:
        heading(console, "each batch size predicted from the others")
        print_table(
            console, ("batch", "worst error"), [(str(at), f"{error:.1%}") for at, error in fit.left_out.items()]
        )
        console.print()
        paragraph(console, f"Mean error of these predictions: {fit.left_out_mean:.1%}.")


def _cell(cell: FittedCell) -> tuple[str, ...]:
    scale = 1e3 if cell.quantity.endswith("_s") and "per_s" not in cell.quantity else 1.0
    digits = 2 if scale > 1 else 0
    values = (figure(scale * value, digits) for value in (cell.measured, cell.fitted))
    return (cell.label, UNITS.get(cell.quantity, cell.quantity), *values, f"{cell.error:+.1%}")


def _parameters(fit: ServerFit) -> list[tuple[str, ...]]:
    posterior = fit.profile.posterior
    rows = []
    for name, value in posterior.values.items():
        scale, unit = (1e6, "µs") if PRIORS[name].unit == "s" else (1.0, PRIORS[name].unit)
        values = (f"{scale * number:.3g}" for number in (value, *posterior.interval(name)))
        state = "at a bound" if name in posterior.at_bounds else "not determined"
        rows.append((name, *values, unit, "determined" if name in posterior.determined else state))
    return rows


def _explained(fit: ServerFit) -> str:
    """Say how the parameters were chosen."""
    posterior = fit.profile.posterior
    unknown = [name for name in posterior.names if name not in posterior.determined]
    undetermined = (
        f" These cells do not determine {', '.join(unknown)}: they stay near assumed values." if unknown else ""
    )
    return (
        "Every parameter that the cells can depend on is fitted, and held near an assumed value as far as the cells do "
        f"not contradict it; from, to: {CONFIDENCE:.0%} interval. Determined: the cells leave at most "
        f"{DETERMINED:.0%} of the assumed uncertainty.{undetermined} Structure: {fit.profile.structure}; another "
        f"one is taken only if the cells are {MARGIN:.0f} times as likely under it."
    )
