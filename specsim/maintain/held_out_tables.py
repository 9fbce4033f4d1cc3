"""Generated tables of the page of held-out errors: published tables, profiles, and identities of queues."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from specsim.core.config import ServingConfig, SpecConfig
from specsim.maintain.result_tables import markdown
from specsim.simulator.acceptance import Option, steady
from specsim.simulator.calibration.observation import PRIORS
from specsim.simulator.calibration.profile import names, profile
from specsim.simulator.calibration.published_report import (
    CHOICE,
    LEFT,
    SIX,
    SPEEDUPS,
    PublishedReport,
    choice_rows,
    left_rows,
    report,
    sentences,
    six_rows,
    speedup_rows,
)
from specsim.simulator.server import simulate
from specsim.simulator.workload import closed_loop, poisson

LOADS = (0.3, 0.5, 0.7, 0.9)  # arrivals a second at a server that takes one second for a request
REQUESTS = 20_000


@cache
def published() -> PublishedReport:
    """Hold out cells and tables, once for all of the page."""
    return report()


def six_cells(folder: Path) -> str:
    """Write the errors after a calibration on six cells, and the rule."""
    text, *_ = sentences(published())
    seen = [f"- {table.table}: {'; '.join(table.seen)}" for table in published().six]
    return _page([text, "", *markdown(SIX, six_rows(published())), "", "Fitted cells:", "", *seen])


def left_out(folder: Path) -> str:
    """Write the errors of tables that were left out, and the share of figures within bands."""
    _, text, bands, *_ = sentences(published())
    return _page([text, "", *markdown(LEFT, left_rows(published())), "", bands])


def measured_speedups(folder: Path) -> str:
    """Write the errors of speed-ups, and the share of them within their bands."""
    *_, text, _ = sentences(published())
    return _page([text, "", *markdown(SPEEDUPS, speedup_rows(published()))])


def choices(folder: Path) -> str:
    """Write the choice of a setting by batch size, and its regret."""
    *_, text = sentences(published())
    notes = [f"- {table.name}: {table.note}" for table in published().tables if table.note]
    return _page([text, "", *markdown(CHOICE, choice_rows(published())), "", *notes])


def profiles(folder: Path) -> str:
    """Write the parameters of every shipped profile with their intervals."""
    rows = []
    for name in names():
        shipped = profile(name)
        made_of = shipped.provenance
        values = []
        for parameter in shipped.posterior.determined:
            scale, unit = (1e6, " µs") if PRIORS[parameter].unit == "s" else (1.0, "")
            low, high = (scale * end for end in shipped.posterior.interval(parameter))
            values.append(
                f"{parameter} {scale * shipped.posterior.values[parameter]:.3g}{unit} ({low:.3g} to {high:.3g})"
            )
        rows.append((name, made_of["hardware"], str(made_of["cells"]), str(shipped.structure), "; ".join(values)))
    return _page(markdown(("profile", "GPU", "cells", "structure", "determined parameters"), rows))


class _OneSecondRounds:
    """A server whose rounds take a second, and prompts nothing."""

    def prefill(self, new_tokens: np.ndarray, contexts: np.ndarray) -> float:
        return 0.0

    def round(self, contexts: np.ndarray, config: SpecConfig) -> float:
        return 1.0

    def mixed(self, new_tokens: np.ndarray, behind: np.ndarray, contexts: np.ndarray, config: SpecConfig) -> float:
        return 1.0


def identities(folder: Path) -> str:
    """Write queueing identities of the simulated timeline: M/D/1, Little's law, saturation."""
    return _page(markdown(("identity", "simulated", "formula", "difference"), _identities()))


@cache
def _identities() -> tuple[tuple[str, ...], ...]:
    """Simulate the identities, once for all pages."""
    option = Option(SpecConfig(1, 3, 4), steady(4, 3))  # every round accepts all 3 drafts: a request takes one round
    one = ServingConfig("sync", 1, 10**6)
    rows = []
    for rate in LOADS:
        run = simulate(_OneSecondRounds(), option, poisson(REQUESTS, rate, 10, 5), one, prefill="beside")
        metrics = run.metrics()
        formula = rate / (2 * (1 - rate))
        rows.append(_row(f"M/D/1, load {rate}: mean wait, s", float(run.e2e.mean()) - 1, formula))
        inside = metrics["Request Throughput (req/s)"] * metrics["Mean E2E Latency (ms)"] * 1e-3
        rows.append(_row(f"Little's law, load {rate}: requests inside", float(run.e2e.sum()) / run.duration, inside))
    for places in (1, 8):
        load = closed_loop(REQUESTS, 4 * places, 10, 5)
        run = simulate(_OneSecondRounds(), option, load, ServingConfig("sync", places, 10**6), prefill="beside")
        rate = run.metrics()["Request Throughput (req/s)"]
        rows.append(_row(f"saturation, {places} places: requests/s", rate, float(places)))
    return tuple(rows)


def _row(name: str, simulated: float, formula: float) -> tuple[str, ...]:
    return (name, f"{simulated:.3f}", f"{formula:.3f}", f"{simulated / formula - 1:+.1%}")


def _page(lines: Sequence[str]) -> str:
    return "\n".join(["", *lines, ""]) + "\n"
