"""Printed form of a calibration."""

import numpy as np
from rich.console import Console

from specsim.core.display import figure, heading, paragraph, print_table
from specsim.simulator.calibration.parameters import PRIORS
from specsim.simulator.calibration.posterior import CONFIDENCE, DETERMINED
from specsim.simulator.calibration.server_fit import UNITS, FittedCell, ServerFit
from specsim.simulator.calibration.structure import MARGIN

_STEPS = 6  # steps of fitted acceptance that are shown


def show(fit: ServerFit, console: Console) -> None:
    """Print the doubts first, then cells, parameters, and errors of batches that were left out."""
    made_of = fit.profile.provenance
    gpus = f"{made_of['tensor_parallel']} × {made_of['hardware']}"
    files = ", ".join(f"{each['path']} ({each['tool']}, {each['cells']} cells)" for each in made_of["files"])
    paragraph(console, f"{made_of['model']} on {gpus}, from {files}")
    if fit.doubts:
        heading(console, "doubts")
        for doubt in fit.doubts:
            paragraph(console, doubt)
    heading(console, "cells")
    print_table(console, ("cell", "figure", "measured", "fitted", "error"), [_cell(each) for each in fit.cells])
    heading(console, "parameters")
    print_table(console, ("parameter", "value", "from", "to", "unit", ""), _parameters(fit))
    console.print()
    paragraph(console, _explained(fit))
    values = fit.profile.posterior.values
    if "accept_rate" in values:
        rates = np.cumprod(values["accept_rate"] * values["accept_decay"] ** np.arange(_STEPS))
        shown = ",".join(f"{rate:.2f}" for rate in rates)
        paragraph(console, f"Accept lengths that were not measured are fitted, as of --accept-rates {shown}.")
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
        values = (f"{scale * each:.3g}" for each in (value, *posterior.interval(name)))
        state = "at a bound" if name in posterior.at_bounds else "not determined"
        rows.append((name, *values, unit, "determined" if name in posterior.determined else state))
    return rows


def _explained(fit: ServerFit) -> str:
    """Say how the parameters were chosen."""
    posterior = fit.profile.posterior
    unknown = [name for name in posterior.names if name not in posterior.determined]
    kept = f" These cells do not determine {', '.join(unknown)}: they stay near assumed values." if unknown else ""
    return (
        "Every parameter that the cells can depend on is fitted, and held near an assumed value as far as the cells do "
        f"not contradict it; from, to: {CONFIDENCE:.0%} interval. Determined: the cells leave at most "
        f"{DETERMINED:.0%} of the assumed uncertainty.{kept} Structure: {fit.profile.structure}; another one is taken "
        f"only if the cells are {MARGIN:.0f} times as likely under it."
    )
