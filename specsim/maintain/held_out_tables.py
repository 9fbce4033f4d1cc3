"""Generated tables of the page of held-out errors: published tables, profiles, and identities of queues."""

from collections.abc import Sequence
from functools import cache

from specsim.bench.simulated import MadeUpTimes
from specsim.core.config import ServingConfig, SpecConfig
from specsim.maintain.page import Column, markdown, table
from specsim.simulator.acceptance import Option, steady
from specsim.simulator.calibration.observation import PRIORS
from specsim.simulator.calibration.profile import Profile, names, profile
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
ONE_SECOND_ROUNDS = MadeUpTimes(round_seconds=1.0, request=0.0, prefill_seconds=0.0, token=0.0)


@cache
def published() -> PublishedReport:
    """Hold out cells and tables, once for all of the page."""
    return report()


def _text(*lines: str | Sequence[str]) -> str:
    """Join paragraphs and tables, with a blank line between them."""
    return "\n\n".join(line if isinstance(line, str) else "\n".join(line) for line in lines)


def six_cells() -> str:
    """Write the errors after a calibration on six cells, and the rule."""
    text, *_ = sentences(published())
    seen = [f"- {table.table}: {'; '.join(table.seen)}" for table in published().six]
    return _text(text, markdown(SIX, six_rows(published())), "Fitted cells:", seen)


def left_out() -> str:
    """Write the errors of tables that were left out, and the share of figures within bands."""
    _, text, bands, *_ = sentences(published())
    return _text(text, markdown(LEFT, left_rows(published())), bands)


def measured_speedups() -> str:
    """Write the errors of speed-ups, and the share of them within their bands."""
    *_, text, _ = sentences(published())
    return _text(text, markdown(SPEEDUPS, speedup_rows(published())))


def choices() -> str:
    """Write the choice of a setting by batch size, and its regret."""
    *_, text = sentences(published())
    notes = [f"- {table.name}: {table.note}" for table in published().tables if table.note]
    return _text(text, markdown(CHOICE, choice_rows(published())), notes)


def profiles() -> str:
    """Write the parameters of every shipped profile with their intervals."""
    return _text(table(PROFILE_COLUMNS, map(profile, names())))


def _parameters(shipped: Profile) -> str:
    values = []
    for parameter in shipped.posterior.determined:
        scale, unit = (1e6, " µs") if PRIORS[parameter].unit == "s" else (1.0, "")
        low, high = (scale * end for end in shipped.posterior.interval(parameter))
        values.append(f"{parameter} {scale * shipped.posterior.values[parameter]:.3g}{unit} ({low:.3g} to {high:.3g})")
    return "; ".join(values)


PROFILE_COLUMNS = (
    Column("profile", lambda shipped: shipped.name),
    Column("GPU", lambda shipped: shipped.provenance["hardware"]),
    Column("cells", lambda shipped: shipped.provenance["cells"]),
    Column("structure", lambda shipped: str(shipped.structure)),
    Column("determined parameters", _parameters),
)


@cache
def identities() -> str:
    """Write queueing identities of the simulated timeline: M/D/1, Little's law, saturation."""
    option = Option(SpecConfig(1, 3, 4), steady(4, 3))  # every round accepts all 3 drafts: a request takes one round
    rows = []
    for rate in LOADS:
        arrivals = poisson(REQUESTS, rate, 10, 5)
        run = simulate(ONE_SECOND_ROUNDS, option, arrivals, ServingConfig("sync", 1, 10**6), prefill="beside")
        metrics = run.metrics()
        formula = rate / (2 * (1 - rate))
        rows.append((f"M/D/1, load {rate}: mean wait, s", float(run.e2e.mean()) - 1, formula))
        inside = metrics["Request Throughput (req/s)"] * metrics["Mean E2E Latency (ms)"] * 1e-3
        rows.append((f"Little's law, load {rate}: requests inside", float(run.e2e.sum()) / run.duration, inside))
    for places in (1, 8):
        load = closed_loop(REQUESTS, 4 * places, 10, 5)
        run = simulate(ONE_SECOND_ROUNDS, option, load, ServingConfig("sync", places, 10**6), prefill="beside")
        rate = run.metrics()["Request Throughput (req/s)"]
        rows.append((f"saturation, {places} places: requests/s", rate, float(places)))
    return _text(table(IDENTITY_COLUMNS, rows))


IDENTITY_COLUMNS = (
    Column("identity", lambda row: row[0]),
    Column("simulated", lambda row: row[1], ".3f"),
    Column("formula", lambda row: row[2], ".3f"),
    Column("difference", lambda row: row[1] / row[2] - 1, "+.1%"),
)
