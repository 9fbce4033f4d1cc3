"""Simulated servers and reproduced tables as text for people to read."""

import math
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from specsim.simulator.results import Run
from specsim.simulator.scenario import Scenario

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.reproduce.reproduction import Reproduction


_MOST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Took:
    """Time of a simulation."""

    seconds: float  # on the clock
    core_seconds: float  # of a core: fewer where other programs had it, too


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload served without drafts and, if there is a drafter, with them."""

    scenario: Scenario
    runs: dict[str, Run]
    took: dict[str, Took]  # by run; measured, so that it differs from one comparison to the next

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        scenario = self.scenario
        return {
            "model": scenario.model.name,
            "hardware": scenario.hardware.name,
            "tensor_parallel": scenario.tensor_parallel,
            "config": asdict(scenario.option.config),
            "efficiency": asdict(scenario.efficiency),
            "simulation_took": {name: asdict(each) for name, each in self.took.items()},
            "runs": {name: run.metrics() | {"seconds": run.duration} for name, run in self.runs.items()},
        }


def compare(scenario: Scenario) -> Comparison:
    """Serve the workload in both ways."""
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
    return Comparison(scenario, runs, took)


def show(comparison: Comparison, console: "Console") -> None:
    """Print both runs side by side, and the parts of a round with the accept length that pays for them by batch."""
    from specsim.core.display import heading, paragraph, print_table, setting

    scenario = comparison.scenario
    runs = comparison.runs
    gpus = f"{scenario.tensor_parallel} × {scenario.hardware.name}"
    paragraph(console, f"{scenario.model.name} on {gpus}; {setting(scenario.option.config)}; simulated, not measured")
    heading(console, "the workload")
    figures = [run.metrics() for run in runs.values()]
    headings = ("", *runs, *(["ratio"] if len(runs) > 1 else []))
    print_table(console, headings, [(name, *_cells([each[name] for each in figures])) for name in figures[0]])
    if len(runs) > 1:
        heading(console, "a round, in ms")
        print_table(console, ("requests", "no drafts", *_PHASES, "pays above"), _rounds(scenario))
    took = ", ".join(
        f"{each.seconds:.1f} s, {each.core_seconds:.1f} s of a core ({name})" for name, each in comparison.took.items()
    )
    console.print()
    paragraph(console, f"simulated {len(scenario.workload):,} requests in {took}")


_PHASES = ("draft", "verify", "extend", "host")


def _rounds(scenario: Scenario) -> list[tuple[str, ...]]:
    """Parts of a round by batch size, and the accept length at which it costs what plain decoding does."""
    rows = []
    size = 1
    while size <= min(_MOST_BATCH, scenario.max_running):
        plain = scenario.phases(scenario.plain, size).total
        phases = scenario.phases(scenario.option, size)
        parts = (f"{1e3 * seconds:.2f}" for seconds in (plain, *(getattr(phases, name) for name in _PHASES)))
        rows.append((str(size), *parts, f"{phases.total / plain:.2f}"))
        size *= 4
    return rows


def _cells(values: list[float]) -> list[str]:
    cells = ["-" if math.isnan(value) else f"{value:,.2f}" for value in values]
    if len(values) > 1:
        plain, drafts = values
        defined = not math.isnan(plain) and not math.isnan(drafts) and plain > 0
        cells.append(f"{drafts / plain:.2f}" if defined else "-")
    return cells


def show_table(result: "Reproduction", console: "Console") -> None:
    """Print the reproduction of a published table, with every error."""
    from specsim.core.display import heading, paragraph, print_table
    from specsim.simulator.reproduce.reproduction import parameter_cells

    console.print(f"{result.name}, {result.source}")
    console.print()
    paragraph(console, result.method)
    heading(console, "side by side")
    headings = ("setting", "", "published", "simulated", "error", "")
    print_table(console, headings, [each.cells() for each in result.figures])
    if result.parameters:
        heading(console, "parameters and their intervals")
        headings = ("parameter", "value", "from", "to", "unit")
        print_table(console, headings, [parameter_cells(each) for each in result.parameters])
    heading(console, "targets")
    rows = [(each.what, each.value, "met" if each.is_met else "not met") for each in result.targets]
    print_table(console, (), rows)
    for note in result.notes:
        console.print()
        paragraph(console, note)
