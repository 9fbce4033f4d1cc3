"""Shipped profiles: fits to all cells of an engine's published tables.

python -m specsim.maintain.profiles writes specsim/simulator/profiles again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specsim.simulator.calibration.posterior import measured
from specsim.simulator.calibration.profile import SHIPPED, Profile
from specsim.simulator.calibration.published import PublishedTable, tables, together_with_shares
from specsim.simulator.calibration.structure import doubts, is_of_another_gpu

MOST_DISCREPANCY = 0.20  # of a profile that ships


def engines(published: Sequence[PublishedTable]) -> dict[str, list[PublishedTable]]:
    """Sort tables by engine."""
    by_engine: dict[str, list[PublishedTable]] = {}
    for table in published:
        by_engine.setdefault(table.engine, []).append(table)
    return by_engine


def shipped(name: str, published: Sequence[PublishedTable], every: Sequence[PublishedTable] = ()) -> Profile:
    """Fit one engine to all cells of its tables; every: all tables, among them those of its shares of peaks."""
    cells = [cell for table in published for cell in table.cells]
    fitted = together_with_shares(published, every)
    errors = fitted.predict(cells) / measured(cells) - 1
    figures = [figure for cell in cells for figure in cell.figures]
    speeds = [error for error, figure in zip(errors, figures, strict=True) if figure != "ttft_s"]
    return Profile(
        name,
        fitted.posterior,
        fitted.structure,
        _provenance(published, cells, doubts(fitted.posterior, np.array(speeds), {})),
    )


def _provenance(published: Sequence[PublishedTable], cells: Sequence[Any], doubted: Sequence[str]) -> Mapping[str, Any]:
    notes = [table.note for table in published if table.note]
    gpus = sorted({cost.hardware.name for table in published for cost in table.costs.values()})
    return {
        "tool": "python -m specsim.maintain.profiles",
        "tables": [table.name for table in published],
        "shares_of": published[0].shares_of or None,
        "model": ", ".join(sorted({cost.model.name for table in published for cost in table.costs.values()})),
        "hardware": ", ".join(gpus),
        "cells": len(cells),
        "notes": notes,
        "doubts": list(doubted),
    }


def write(folder: Path = SHIPPED) -> None:
    """Write every profile."""
    folder.mkdir(exist_ok=True)
    every = tables()
    for name, published in engines(every).items():
        profile = shipped(name, published, every)
        if profile.posterior.discrepancy > MOST_DISCREPANCY or is_of_another_gpu(profile.posterior):
            continue  # no server explains its tables
        value = profile.to_json()
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
