"""Rounds of specsim.fast measured on a GPU (fast/measurements), reproduced by the cost model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require_choice
from specsim.simulator.cost import CostModel
from specsim.simulator.drafter import drafter
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import Hardware, names, reported_hardware
from specsim.simulator.model import model
from specsim.simulator.reproduce.reproduction import AccuracyTarget, Reproduction, Timed, calibrate, figures_of

KEPT = Path("fast") / "measurements" / "bench-scale.json"
FREE = ("bandwidth", "compute", "overlap", "gap")
FITTED_REQUESTS = (1, 64)
FITTED_LENGTHS = (1024, 4096)
MOST_ERROR = 0.10
TAKEN = {"host": 0.0, "host_request": 0.0}  # the device only: it replays a graph for every round
DRAFT_VOCAB = 32000
TREES = {"plain": SpecConfig.plain(), "(4, 3, 8)": SpecConfig(4, 3, 8)}  # as specsim bench writes them


def reproduce() -> Reproduction:
    """Fit four parameters to the corners of the grid, and predict the other points."""
    path = kept_file()
    value = json.loads(path.read_bytes())
    rows = [row for row in value["rows"] if row["name"] == "growth" and "ours" in row["timings"]]
    cost = cost_of(value)
    _, calibration = calibrate(cost, [_timed(row) for row in rows], FREE)
    errors = calibration.errors(held_out=True)
    target = AccuracyTarget(
        "held-out round times",
        f"{errors.mean():.1%} off on average, target {MOST_ERROR:.0%}; {errors.max():.1%} at worst",
        bool(errors.mean() <= MOST_ERROR),
    )
    figures = figures_of(calibration, "round, ms", 3, 1e3)
    source = f"fast/measurements/{path.name}"
    method = _METHOD.format(fitted=len(calibration.cells) - len(errors), held_out=len(errors), shape=value["shape"])
    return Reproduction("fast_rounds", source, method, figures, calibration.parameters, targets=(target,))


def kept_file() -> Path:
    """Find the kept result in a checkout or in an installed package."""
    package = Path(__file__).parents[2]
    for path in (package.parent / KEPT, package / KEPT):
        if path.is_file():
            return path
    allowed = "a result of specsim bench --suite scale that python -m specsim.maintain.tables keeps there"
    raise InputError("bench-scale.json", "not in fast/measurements", allowed)


def _gpu(value: Mapping[str, Any]) -> Hardware:
    reported = value["runs"][0]["versions"]["gpu"]
    gpu = reported_hardware(reported)
    if gpu is None:
        raise InputError("gpu", reported, ", ".join(names()))
    return gpu


def cost_of(value: Mapping[str, Any]) -> CostModel:
    """Make the cost model of a kept result."""
    target = model(value["shape"])
    return CostModel(_gpu(value), target, drafter("eagle3", target, DRAFT_VOCAB), Efficiency(**TAKEN))


def _timed(row: Mapping[str, Any]) -> Timed:
    requests, length, tree = (row["setting"][name] for name in ("requests", "L", "tree"))
    require_choice("tree", tree, TREES)
    contexts = np.full(requests, length)
    config = TREES[tree]
    is_fitted = requests in FITTED_REQUESTS and length in FITTED_LENGTHS
    return Timed(
        f"{tree}, {requests} requests, L {length}",
        row["timings"]["ours"]["median_us"] * 1e-6,
        lambda cost: cost.round(contexts, config),
        held_out=not is_fitted,
    )


_METHOD = (
    "Rounds of {shape} with random weights in bfloat16, plain and with an EAGLE-3 tree of topk 4, 3 steps, 8 tokens, "
    "medians as kept. 4 parameters: shares of bandwidth and arithmetic, how far they overlap, the gap between kernels; "
    "fitted to {fitted} cells (1 and 64 requests at lengths of 1024 and 4096, with both trees), {held_out} held out."
)
