"""A server calibrated on benchmark files: its profile, every cell, and what to doubt."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from specsim import __version__
from specsim.core.errors import require
from specsim.core.kinds import DEFAULT
from specsim.simulator.calibration.benchmark_file import Source, read
from specsim.simulator.calibration.chain_acceptance import chain_acceptance
from specsim.simulator.calibration.context import Context
from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.plausible import doubts
from specsim.simulator.calibration.posterior import measured
from specsim.simulator.calibration.profile import Profile
from specsim.simulator.calibration.structure import Calibrated, Structure, calibrate, left_out
from specsim.simulator.cost import CostModel

UNITS = {"tokens_per_s": "tok/s", "decode_tokens_per_s": "tok/s, decoding", "tpot_s": "TPOT, ms", "ttft_s": "TTFT, ms"}


@dataclass(frozen=True, slots=True)
class FittedCell:
    """A figure that the fit saw."""

    label: str
    quantity: str
    measured: float
    fitted: float

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
    tried: Mapping[Structure, float]
    doubts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "profile": self.profile.to_json(),
            "cells": [asdict(each) | {"error": each.error} for each in self.cells],
            "left_out": [{"batch": size, "worst_error": error} for size, error in self.left_out.items()],
            "left_out_mean_error": self.left_out_mean,
            "structures": [
                {"schedule": each.schedule, "graphs": each.graphs, "objective": value}
                for each, value in self.tried.items()
            ],
            "doubts": list(self.doubts),
        }


def read_files(paths: Sequence[Path], context: Context) -> tuple[list[Source], list[Observation]]:
    """Read the cells of all files."""
    require(paths, "file", "none", "at least one file of a benchmark")
    sources = []
    cells: list[Observation] = []
    for path in paths:
        source, found = read(path, context)
        sources.append(source)
        cells += found
    return sources, cells


def fit_server(
    cost: CostModel, cells: Sequence[Observation], sources: Sequence[Source], name: str, drafter: str = DEFAULT
) -> ServerFit:
    """Calibrate a server; `name` is the profile's, `drafter` the drafter's architecture."""
    found = calibrate({"": cost}, cells)
    figures = [(cell.label, name) for cell in cells for name in cell.figures]
    pairs = zip(figures, measured(cells).tolist(), found.predict(cells).tolist(), strict=True)
    fitted = tuple(FittedCell(*figure, value, predicted) for figure, value, predicted in pairs)
    outside = left_out(found.costs, cells)
    speeds = np.array([each.error for each in fitted if each.quantity != "ttft_s"] or [0.0])
    worst = {size: float(np.abs(errors).max()) for size, errors in outside.items()}
    every = np.concatenate(list(outside.values())) if outside else None
    acceptance = chain_acceptance(cost.model.name, drafter, cells, found.posterior)
    made_of = provenance(cost, sources, len(cells), found)
    return ServerFit(
        Profile(name, found.posterior, found.structure, made_of, acceptance),
        fitted,
        worst,
        None if every is None else float(np.abs(every).mean()),
        found.tried,
        tuple(doubts(found.posterior, speeds, outside)),
    )


def provenance(cost: CostModel, sources: Sequence[Source], cells: int, found: Calibrated) -> dict[str, Any]:
    """Record what a profile was made of."""
    return {
        "tool": f"specsim calibrate {__version__}",
        "date": datetime.now(UTC).date().isoformat(),
        "model": cost.model.name,
        "hardware": cost.hardware.name,
        "tensor_parallel": cost.tensor_parallel,
        "files": [asdict(each) for each in sources],
        "cells": cells,
        "determined": list(found.posterior.determined),
    }
