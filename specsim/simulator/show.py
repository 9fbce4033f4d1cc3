"""Printed form of simulated servers and reproduced tables."""

import math
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

from rich.console import Console

from specsim.core.display import heading, paragraph, print_table, setting, short_setting
from specsim.simulator.calibration.posterior import CONFIDENCE
from specsim.simulator.reproduce.reproduction import Reproduction, parameter_cells
from specsim.simulator.results import SimulatedRun
from specsim.simulator.scenario import (
    MOST_REQUESTS,
    Scenario,
    SpeedupRange,
    calibration,
    ratio_ranges,
    speedup_range,
    used_profile,
)

_MOST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Took:
    """Time of a simulation."""

    seconds: float  # wall-clock seconds
    core_seconds: float  # seconds of a CPU core


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload served without drafts and, if there is a drafter, with them."""

    scenario: Scenario
    runs: dict[str, SimulatedRun]
    took: dict[str, Took]  # by run; measured, so it varies
    ratios: dict[str, SpeedupRange]  # by metric, drafts over no drafts; empty without drafts

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        scenario = self.scenario
        return {
            "model": scenario.model.name,
            "hardware": scenario.hardware.name,
            "tensor_parallel": scenario.tensor_parallel,
            "config": asdict(scenario.option.config),
            "efficiency": asdict(scenario.efficiency),
            "calibration": calibration(scenario),
            "simulation_took": {name: asdict(time) for name, time in self.took.items()},
            "runs": {name: run.metrics() | {"seconds": run.duration} for name, run in self.runs.items()},
            "ratios": {
                name: {"value": ratio.value, "lowest": ratio.lowest, "highest": ratio.highest}
                for name, ratio in self.ratios.items()
            },
            "profile": scenario.profile and scenario.profile.name,
            "adaptive": scenario.policy and {"policy": scenario.policy.to_json(), "rounds_by_setting": self.by_setting},
        }

    @property
    def by_setting(self) -> list[int]:
        """Rounds of requests under each setting of the policy, in their order."""
        return [int(rounds.sum()) for rounds in self.runs["drafts"].accepted_drafts]


def compare(scenario: Scenario) -> Comparison:
    """Serve the workload with and without drafts.

    Parts of it are served again with other parameters, for the bands of the ratios.
    """
    options = {"no drafts": scenario.plain}
    if not scenario.option.config.is_plain:
        options["drafts"] = scenario.option
    runs = {}
    took = {}
    for name, option in options.items():
        start = perf_counter()
        core = process_time()
        runs[name] = scenario.run(option)
        took[name] = Took(perf_counter() - start, process_time() - core)
    ratios = ratio_ranges(scenario, *runs.values()) if len(runs) > 1 else {}
    return Comparison(scenario, runs, took, ratios)


def show(comparison: Comparison, console: Console) -> None:
    """Print both runs side by side, and the parts of a round with its break-even accept length by batch."""
    scenario = comparison.scenario
    runs = comparison.runs
    gpus = f"{scenario.tensor_parallel} × {scenario.hardware.name}"
    words = calibration(scenario)
    paragraph(console, f"{scenario.model.name} on {gpus}; {setting(scenario.option.config)}; {words}")
    heading(console, "the workload")
    headings = ("", *runs, *(["ratio", "90% band"] if comparison.ratios else []))
    print_table(console, headings, _metrics(comparison))
    if comparison.ratios:
        heading(console, "a round, in ms")
        columns = ("requests", "no drafts", *_PHASES, "break-even", "speed-up", "90% band")
        print_table(console, columns, _rounds(scenario))
        console.print()
        paragraph(console, f"Ratios and speed-ups are {words}; {_bands(scenario)}")
    if scenario.policy is not None:
        counts = zip(scenario.policy.settings, comparison.by_setting, strict=True)
        rounds = "; ".join(f"{short_setting(config)}: {count:,}" for config, count in counts)
        console.print()
        paragraph(console, f"Rounds under policy {scenario.policy.name}: {rounds}.")
    took = ", ".join(
        f"{time.seconds:.1f} s, {time.core_seconds:.1f} s of a core ({name})" for name, time in comparison.took.items()
    )
    console.print()
    paragraph(console, f"simulated {len(scenario.workload):,} requests in {took}")


_PHASES = ("draft", "verify", "extend", "host")


def _bands(scenario: Scenario) -> str:
    """Say what the bands hold."""
    profile = used_profile(scenario)
    served = (
        f" (of ratios, over the first {MOST_REQUESTS:,} requests)" if len(scenario.workload) > MOST_REQUESTS else ""
    )
    whose = "" if scenario.profile else ", the default for this model,"
    return (
        f"bands hold {CONFIDENCE:.0%}, by the uncertainty of profile {profile.name}{whose} and "
        f"{profile.posterior.discrepancy:.0%} of the model{served}."
    )


def _rounds(scenario: Scenario) -> list[tuple[str, ...]]:
    """Make rows by batch size: parts of a round, break-even accept length, speed-up."""
    rows = []
    size = 1
    while size <= min(_MOST_BATCH, scenario.max_running):
        plain = scenario.phases(scenario.plain, size).total
        phases = scenario.phases(scenario.option, size)
        parts = (f"{1e3 * seconds:.2f}" for seconds in (plain, *(getattr(phases, name) for name in _PHASES)))
        speedup = speedup_range(scenario, size)
        rows.append((str(size), *parts, f"{phases.total / plain:.2f}", f"{speedup.value:.2f}", speedup.span))
        size *= 4
    return rows


def _metrics(comparison: Comparison) -> list[tuple[str, ...]]:
    """Make rows of every metric: both runs, and their ratio with its range."""
    rows = []
    metrics = [run.metrics() for run in comparison.runs.values()]
    for name in metrics[0]:
        cells = ["-" if math.isnan(run_metrics[name]) else f"{run_metrics[name]:,.2f}" for run_metrics in metrics]
        if comparison.ratios:
            ratio = comparison.ratios.get(name)
            cells += [f"{ratio.value:.2f}", ratio.span] if ratio else ["-", "-"]
        rows.append((name, *cells))
    return rows


def show_table(result: Reproduction, console: Console) -> None:
    """Print the reproduction of a published table, with every error."""
    console.print(f"{result.name}, {result.source}")
    console.print()
    paragraph(console, result.method)
    heading(console, "side by side")
    headings = ("setting", "", "published", "simulated", "error", "")
    print_table(console, headings, [figure.cells() for figure in result.figures])
    if result.parameters:
        heading(console, "parameters and their intervals")
        headings = ("parameter", "value", "from", "to", "unit")
        print_table(console, headings, [parameter_cells(parameter) for parameter in result.parameters])
    heading(console, "targets")
    rows = [(target.name, target.value, "reached" if target.is_reached else "not reached") for target in result.targets]
    print_table(console, (), rows)
    for note in result.notes:
        console.print()
        paragraph(console, note)
